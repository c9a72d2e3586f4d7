"""What a process holds of the model, as the training loop sees it.

One process holds everything and exchanges nothing: `Layout`, the no-op. With `ddp` each process
holds the whole model, and gradients are summed: `parallel/replicas.py`. With `fsdp2` each process
holds a shard: `parallel/shards.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.data import Batch
from mprun.data.batches import NOTHING_COUNTS, Whole
from mprun.errors import RunFailedError
from mprun.parallel.ranks import Ranks
from mprun.precision.combine import ALONE, Combine
from mprun.precision.policy import Policy

Compute = Callable[[], tuple[Tensor, Any]]
"""Runs a forward pass: its loss and its output."""


class Layout:
    """One process with the whole model."""

    kind = "none"
    """none, ddp or fsdp2."""
    combine: Combine = ALONE
    """What the processes agree on norms and overflows by."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()

    def arrange(self, model: nn.Module, policy: Policy) -> None:
        """Take a prepared model, before its optimizer is made."""

    @contextmanager
    def trainable(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the parameters that its optimizer gets."""
        yield

    def compute(self, compute: Compute, size: int, is_last: bool) -> tuple[Tensor, Any]:
        """Run a forward pass whose backward pass follows.

        Args:
            compute: runs it.
            size: this process's samples in it; 0: it counts nothing.
            is_last: whether it is the step's last one, after which gradients are exchanged.
        """
        return compute()

    def end_backward(self) -> None:
        """All backward passes of a step are done: give the parameters their final gradients."""

    def weighted(self, batch: Batch) -> Batch:
        """The batch with the weight of the whole, where each process knows its own part's alone."""
        return batch

    def model_state(self, model: nn.Module) -> Mapping[str, Any]:
        """The whole model's state, as one process has it."""
        return model.state_dict()

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a whole model's state."""
        model.load_state_dict(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state, as one process has it."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a whole optimizer's state."""
        optimizer.load_state_dict(state)


class GroupLayout(Layout):
    """One of several processes, each of which trains on its part of every batch."""

    def weighted(self, batch: Batch) -> Batch:
        if batch.whole is None or batch.whole.weight is not None:
            return batch
        own = sum(part.size for part in batch.parts)
        weight, size = self.ranks.totals([batch.weight, own])
        if not weight:
            raise RunFailedError(NOTHING_COUNTS)
        return batch._replace(whole=Whole(round(size), weight))
