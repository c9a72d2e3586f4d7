"""Some samples of a batch: what lies along dimension 0 of its tensors, and in its lists of values.

A batch that lists its samples in another way (a list of images, of which each is a tensor) does not
say which of its dimensions are samples, so it is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mprun.data.batches import Batch, MicroBatch

_VALUES = (str, bytes, bool, int, float, type(None))


class CannotBeCutError(Exception):
    """A batch does not say which part of it is a sample."""


def first_samples(part: MicroBatch, at_most: int) -> MicroBatch:
    """At most that many samples of a micro-batch; all where it cannot be cut."""
    if part.size <= at_most:
        return part
    try:
        return _part_of(part, 0, at_most)
    except CannotBeCutError:
        return part


def halves(batch: Batch) -> tuple[Batch, Batch] | None:
    """The two halves of a batch, of equal size; None for what cannot be cut.

    Several parts are divided among the halves, one is cut.
    """
    parts, half = batch.parts, len(batch.parts) // 2
    if half:
        return Batch(parts[:half]), Batch(parts[half : 2 * half])
    size = parts[0].size // 2
    if not size:
        return None
    try:
        return tuple(Batch((_part_of(parts[0], n, size),)) for n in (0, size))  # type: ignore[return-value]
    except CannotBeCutError:
        return None


def _part_of(part: MicroBatch, start: int, size: int) -> MicroBatch:
    content = _rows(part.content, start, size, part.size)
    inputs = _rows(part.inputs, start, size, part.size)
    return MicroBatch(content, inputs, size, part.weight * size / part.size)


def _rows(value: Any, start: int, size: int, whole: int) -> Any:
    """Samples `start` to `start + size` of `whole`; tensors are views."""
    if isinstance(value, Tensor):
        if not value.dim() or len(value) != whole:
            raise CannotBeCutError
        return value[start : start + size]
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, Mapping):
        if type(value) is not dict:
            raise CannotBeCutError
        return {key: _rows(item, start, size, whole) for key, item in value.items()}
    if type(value) not in (list, tuple):
        raise CannotBeCutError
    if any(isinstance(item, _VALUES) for item in value):
        if len(value) != whole or not all(isinstance(item, _VALUES) for item in value):
            raise CannotBeCutError
        return value[start : start + size]
    if len(value) == whole and whole > 2:  # a list of samples, or as many columns
        raise CannotBeCutError
    return type(value)(_rows(item, start, size, whole) for item in value)
