"""Float32 copies of 16-bit tensors, so that emulation does not widen the same numbers twice.

Emulation computes in float32 and stores in 16 bits. Taken literally, each op widens its inputs and
rounds its result: two passes over memory for each tensor that passes from one op to the next, and
one more for each op of the backward pass that reads it again. Instead the loop that rounds a result
writes it twice, as 16 bits and as the float32 of the same value, over the unrounded result. The
next op reads the float32 numbers as they are. Memory is the price: six bytes a number, not two.

A copy belongs to a storage, so views share it, and lives as long. It is valid

- while nothing was written to the tensor: PyTorch counts writes, and emulation drops the copy of
  what an op writes to, also through `Tensor.data`, which has a count of its own;
- within its generation: one training step, or one region outside of a step. Kernels that PyTorch
  does not know of write to parameters and gradients between two steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mprun._torch import write_count

ATTRIBUTE = "_mprun_wide_copy"
"""The attribute of a storage that holds its copy."""


class _WideCopy(NamedTuple):
    wide: Tensor
    """As many float32 numbers as the storage has of 16 bits, in the same order."""
    writes: int
    owner: WideCopies
    generation: int


class WideCopies:
    """The copies that one arithmetic made."""

    def __init__(self) -> None:
        self._generation = 0

    def invalidate(self) -> None:
        """A new generation begins."""
        self._generation += 1

    def keep(self, low: Tensor, wide: Tensor) -> None:
        """`wide` has the values of `low`, its strides, and a storage of its own; both are whole."""
        copy = _WideCopy(wide, write_count(low), self, self._generation)
        setattr(low.untyped_storage(), ATTRIBUTE, copy)

    def get(self, low: Tensor) -> Tensor | None:
        """The copy of `low`, not to be written to, laid out as `low.float()` would be, or None."""
        copy = self._valid(low)
        if copy is None or not is_dense(low):
            return None
        wide = copy.wide
        if wide.shape == low.shape and wide.stride() == low.stride():
            return wide
        return wide.as_strided(low.size(), low.stride(), low.storage_offset())

    def take(self, low: Tensor) -> Tensor | None:
        """The copy of a whole `low` for the caller alone, which may write to it, or None.

        It is no copy any more.
        """
        wide = self.get(low) if is_whole(low) else None
        if wide is not None:
            forget(low)
        return wide

    def _valid(self, low: Tensor) -> _WideCopy | None:
        storage = low.untyped_storage()
        copy: _WideCopy | None = getattr(storage, ATTRIBUTE, None)
        if copy is None or copy.owner is not self or copy.generation != self._generation:
            return None
        resized = copy.wide.numel() * low.element_size() != storage.nbytes()
        return None if resized or copy.writes != write_count(low) else copy


def forget(low: Tensor) -> None:
    """Drop the copy of what shares memory with `low`, if there is one."""
    vars(low.untyped_storage()).pop(ATTRIBUTE, None)


def is_dense(x: Tensor) -> bool:
    """Whether the numbers of `x` lie side by side in some order, without gaps or overlaps."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_whole(x: Tensor) -> bool:
    """Whether `x` is dense and all of its storage."""
    filled = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return filled and int(x.storage_offset()) == 0 and is_dense(x)


def is_plain(x: Tensor) -> bool:
    """Whether `x` is a CPU tensor with memory of its own, which a C kernel can read."""
    kind = type(x) is Tensor or type(x) is torch.nn.Parameter
    return kind and x.is_cpu and x.layout is torch.strided
