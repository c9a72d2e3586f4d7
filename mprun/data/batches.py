"""Samples decoded in memory, and batches made of them there.

A data loader with worker processes pays for decoding, pickling and collating every sample; for
sets that fit in memory that is most of a step's wait. Here samples lie decoded in one tensor, on
the training device where they fit; a batch is one gather and the recipe's `prepare` on the whole
batch, with no Python work per sample. Transfers to a device are as small as possible: bytes and
other integers are sent as stored and prepared there; floating samples are prepared first, in the
dtype of the mode's inputs.

The order of samples is drawn once per epoch from a generator seeded with the run's seed and used
for nothing else, so it is the same in every precision mode and on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Prepare = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorSet:
    """Samples in memory.

    Attributes:
        inputs: [N, ...] of any dtype, as stored.
        targets: [N, ...], as the recipe's loss takes them.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes that inputs and targets occupy."""
        return self.inputs.nbytes + self.targets.nbytes

    def first(self, n: int | None) -> TensorSet:
        """The first `n` samples, or all where `n` is None; no copy."""
        return self if n is None else TensorSet(self.inputs[:n], self.targets[:n])

    def split(self, n: int) -> tuple[TensorSet, TensorSet]:
        """The first `n` samples and the rest; no copy."""
        return self.first(n), TensorSet(self.inputs[n:], self.targets[n:])

    def with_inputs(self, dtype: torch.dtype) -> TensorSet:
        """The same samples with inputs of `dtype`; no copy if they are."""
        return TensorSet(self.inputs.to(dtype), self.targets)

    def to(self, device: torch.device) -> TensorSet:
        """A copy on `device`."""
        return TensorSet(self.inputs.to(device), self.targets.to(device))


class Batch(NamedTuple):
    """One optimizer step's samples on the training device, ready for the model."""

    inputs: Tensor
    targets: Tensor
    size: int


class Order:
    """The order in which an epoch visits the samples; its state is the generator's.

    Args:
        samples: how many there are.
        seed: the run's seed.
        shuffle: False visits them in the stored order.
    """

    def __init__(self, samples: int, seed: int, shuffle: bool) -> None:
        self._samples = samples
        self._shuffle = shuffle
        self._generator = torch.Generator().manual_seed(seed)

    def state(self) -> Tensor:
        """The generator's state: what the next `draw` depends on; empty where none is drawn."""
        return self._generator.get_state() if self._shuffle else torch.empty(0, dtype=torch.uint8)

    def restore(self, state: Tensor, drawn: bool) -> None:
        """Go back to `state`, and past the one epoch drawn from it where `drawn`."""
        if self._shuffle:
            self._generator.set_state(state)
            if drawn:
                self.draw()

    def draw(self) -> Tensor | None:
        """The next epoch's permutation [N], or None for the stored order."""
        if not self._shuffle:
            return None
        return torch.randperm(self._samples, generator=self._generator)


class Batches:
    """Cuts a set into batches, prepares each and sends it to the training device.

    Integer inputs are sent first, floating ones last.

    Args:
        data: the samples, on `device` or in the CPU's memory.
        batch_size: samples per batch; the last one of an epoch may be smaller.
        prepare: makes the model's inputs, in the mode's dtype, of stored ones.
        device: where batches are needed.
    """

    def __init__(
        self, data: TensorSet, batch_size: int, prepare: Prepare, device: torch.device
    ) -> None:
        self.data = data
        self.batch_size = batch_size
        self._prepare = prepare
        self.device = device

    def __len__(self) -> int:
        return -(-len(self.data) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Batches in the stored order."""
        return self.epoch(None)

    def epoch(self, order: Tensor | None, skip: int = 0) -> Iterator[Batch]:
        """Batches in the given order ([N] of indices, or None for the stored one), less `skip`."""
        size, total = self.batch_size, len(self.data)
        inputs, targets = self.data.inputs, self.data.targets
        if order is not None:
            order = order.to(inputs.device)
        for start in range(skip * size, total, size):
            stop = min(start + size, total)
            if order is None:
                x, y = inputs[start:stop], targets[start:stop]
            else:
                index = order[start:stop]
                x, y = inputs.index_select(0, index), targets.index_select(0, index)
            if x.is_floating_point():
                x = self._prepare(x).to(self.device)
            else:
                x = self._prepare(x.to(self.device))
            yield Batch(x, y.to(self.device), stop - start)


def place(data: TensorSet, device: torch.device) -> TensorSet:
    """`data`, on `device` if it takes at most half of the free memory there."""
    if device.type != "cuda" or data.inputs.device == device:
        return data
    free, _ = torch.cuda.mem_get_info(device)
    return data.to(device) if data.nbytes <= free // 2 else data
