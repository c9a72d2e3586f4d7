"""What a process holds of the model, as the training loop sees it.

One process holds everything and exchanges nothing: `Layout`, the no-op. With `ddp` each process
holds the whole model, and gradients are summed: `replicas.py`. With `fsdp2` each process
holds a shard: `shards.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.errors import RunFailedError
from mprun.precision import devices
from mprun.precision.policy import Policy
from mprun.precision.update import ALONE, Combine
from mprun.train.data import Batch
from mprun.train.data.batches import NOTHING_COUNTS, Whole
from mprun.train.parallel.ranks import Ranks


class Outline(NamedTuple):
    """A state without its shards."""

    state: Any  # The state; a tensor without values, on the device meta, stands for each shard
    tied: dict[str, str] | None = None
    """Names of shards that are others under another name, to those others' names; None if the state
    has no shards."""


Compute = Callable[[], tuple[Tensor, Any]]  # Runs a forward pass: its loss and its output


class Layout:
    """One process with the whole model."""

    kind = "none"  # none, ddp or fsdp2
    combine: Combine = ALONE  # What the processes agree on norms and overflows by

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
        """The model's state; what the processes have cut is a `DTensor`, of the whole shape."""
        return model.state_dict()

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a model's state, with whole tensors or those of `fetch`."""
        model.load_state_dict(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, cut as the model's."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load an optimizer's state, with whole tensors or those of `fetch`."""
        optimizer.load_state_dict(state)

    def write_shards(self, state: dict[str, Any], folder: Path) -> tuple[Outline, Future[None]]:
        """Begin to write what the processes have cut, each its part.

        Args:
            state: `model_state` and `optimizer_state` are in it.
            folder: a new folder, the same one for all processes.

        Returns:
            What is left for one file, and what is done when all parts are written; its error is
            that of any process.
        """
        done: Future[None] = Future()
        done.set_result(None)
        return Outline(state), done

    def fetch(self, outline: Outline, folder: Path) -> Any:
        """Read the shards of a state, so that it can be loaded.

        Raises:
            OSError: a file cannot be read.
            DamagedShardsError: a shard is missing, or has another shape or dtype.
        """
        from mprun.train.parallel import shard_files  # imports a second of PyTorch

        def whole(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype)  # on the CPU

        return shard_files.read(outline.state, outline.tied or {}, folder, whole)


class BufferMean:
    """Gives all processes the mean of their floating buffers, such as BatchNorm's statistics.

    Each process saw other samples. Processes that trained on none do not count.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]

    def begin(self, took_part: bool) -> None:
        """Begin to average the buffers, which a step's forward passes have updated.

        In float64: what is equal in all processes stays as it is.

        Args:
            took_part: whether this process's passes were on samples of its own.
        """
        if not self._buffers:
            return
        flat = torch.cat([devices.wide(b.detach().reshape(-1)) for b in self._buffers])
        flat = torch.cat([flat, flat.new_ones(1)])
        self._sums = flat if took_part else torch.zeros_like(flat)
        self._wait = self._ranks.begin_sums([self._sums])

    def finish(self) -> None:
        """Give the buffers their means."""
        if not self._buffers:
            return
        self._wait()
        means = self._sums[:-1] / self._sums[-1]
        parts = means.split([b.numel() for b in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.data.copy_(part.view(buffer.shape))


class GroupLayout(Layout):
    """One of several processes, each of which trains on its part of every batch."""

    def arrange(self, model: nn.Module, policy: Policy) -> None:
        self._buffers = BufferMean(model, self.ranks)
        self._took_part = False
        """Whether a pass of this step was on samples of this process, not on spare ones."""

    def compute(self, compute: Compute, size: int, is_last: bool) -> tuple[Tensor, Any]:
        self._took_part |= size > 0
        result = compute()
        if is_last:
            self._buffers.begin(self._took_part)  # beside the backward pass
        return result

    def end_backward(self) -> None:
        self._buffers.finish()
        self._took_part = False

    def weighted(self, batch: Batch) -> Batch:
        if batch.whole is None or batch.whole.weight is not None:
            return batch
        own = sum(part.size for part in batch.parts)
        weight, size = self.ranks.totals([batch.weight, own])
        if not weight:
            raise RunFailedError(NOTHING_COUNTS)
        return batch._replace(whole=Whole(round(size), weight))
