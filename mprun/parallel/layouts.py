"""What a process holds of the model, as the training loop sees it.

One process holds everything and exchanges nothing: `Layout`, the no-op. With `ddp` each process
holds the whole model, and gradients are summed: `ReplicaLayout`. With `fsdp2` each process holds a
shard: `parallel/shards.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.data import Batch
from mprun.data.batches import NOTHING_COUNTS, Whole
from mprun.errors import RunFailedError
from mprun.parallel.ranks import Ranks
from mprun.parallel.reduction import BufferMean, GradientSum
from mprun.precision.combine import ALONE, Combine
from mprun.precision.policy import Policy, torch_dtype


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

    def end_backward(self, took_part: bool) -> None:
        """All backward passes of a step are done: give the parameters their final gradients.

        Args:
            took_part: whether this process trained on samples of the step.
        """

    def weighted(self, batch: Batch) -> Batch:
        """The batch with the weight of the whole, where each process knows its own part's alone."""
        return batch

    def has_new(self, parts: Mapping[str, Tensor]) -> bool:
        """Whether a part of the loss has a name that the other processes may not know."""
        return False

    def learn(self, parts: Mapping[str, Tensor]) -> None:
        """Tell all processes the names of the parts of the loss."""

    def sums(
        self, loss: Tensor, correct: Tensor | None, parts: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """The loss of a step, its right samples and the parts of the loss, over all processes."""
        return loss, correct, parts

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

    _names: tuple[str, ...] = ()
    """Of the parts of the loss, in the order in which they are added up."""

    def weighted(self, batch: Batch) -> Batch:
        if batch.whole is None or batch.whole.weight is not None:
            return batch
        own = sum(part.size for part in batch.parts)
        weight, size = self.ranks.totals([batch.weight, own])
        if not weight:
            raise RunFailedError(NOTHING_COUNTS)
        return batch._replace(whole=Whole(round(size), weight))

    def has_new(self, parts: Mapping[str, Tensor]) -> bool:
        return any(name not in self._names for name in parts)

    def learn(self, parts: Mapping[str, Tensor]) -> None:
        own = dict.fromkeys((*self._names, *parts))
        every = self.ranks.gather([*own])
        self._names = tuple(dict.fromkeys(name for names in every for name in names))

    def sums(
        self, loss: Tensor, correct: Tensor | None, parts: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        zero = loss.new_zeros(())
        count = zero if correct is None else correct
        counted = loss.new_tensor(float(correct is not None))
        terms = [parts.get(name, zero) for name in self._names]
        # float64 holds every count and every float32 exactly
        scalars = [loss, count, counted, *terms]
        numbers = torch.stack([x.detach().double().reshape(()) for x in scalars])
        self.ranks.sum_tensors([numbers])
        total, right, known, *sums = numbers.unbind()
        is_known = self._counts(known)
        named = dict(zip(self._names, (x.float() for x in sums), strict=True))
        return total.float(), right.long() if is_known else None, named

    _counting: bool | None = None

    def _counts(self, known: Tensor) -> bool:
        """Whether right samples are counted; read once, so that later steps need not wait."""
        if self._counting is None:
            self._counting = bool(known.item())
        return self._counting


class ReplicaLayout(GroupLayout):
    """The whole model in each process; all of them take the same steps."""

    kind = "ddp"

    def arrange(self, model: nn.Module, policy: Policy) -> None:
        self._sum = GradientSum(model, self.ranks, torch_dtype(policy.reduce_dtype))
        self._buffers = BufferMean(model, self.ranks)

    def end_backward(self, took_part: bool) -> None:
        self._sum(took_part)
        self._buffers(took_part)
