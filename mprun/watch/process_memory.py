"""The memory alive during a training step: sums over the storages of a `MemoryRecorder`.

A rule turns the storages of a single process into those of one of several (`ReplicatedModel`,
`ShardedModel`). Each process computes the same ops on its own batch, so activations and buffers are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from math import ceil
from operator import itemgetter
from typing import NamedTuple

import torch

from mprun.precision.policy import dtype_name
from mprun.records.run_record import (
    MEMORY_CATEGORIES,
    MemoryPeak,
    MemoryTimeline,
    ModuleMemory,
    StorageMemory,
)


@dataclass(slots=True)
class LiveStorage:
    """A storage: memory that one tensor or several share."""

    nbytes: int
    category: str  # One of `MEMORY_CATEGORIES`
    owner: str  # Path of the module it belongs to, or one of `(inputs)`, `(loss)`, `(optimizer)`
    born: int  # The first point at which it is alive
    shape: tuple[int, ...]  # The shape of the first tensor on it
    dtype: torch.dtype
    died: int | None = None
    """The first point at which it is no longer alive; None where it outlives the step."""
    cast_of: LiveStorage | None = None
    """The storage whose numbers it has in another dtype, where one cast made it."""

    def alive_at(self, point: int) -> bool:
        """Whether it is alive right after op number `point`."""
        return self.born <= point and (self.died is None or point < self.died)


class MemoryPoint(NamedTuple):
    """An op of the step: memory is counted right after it."""

    op: str  # ATen's name
    phase: str  # forward, backward, optimizer, or other (loss, loss scale, clipping)
    owner: str  # As in `LiveStorage`


@dataclass(frozen=True)
class StepMemory:
    """The memory of one training step."""

    points: tuple[MemoryPoint, ...]
    """Its ops, in the order they ran."""
    timeline: Mapping[str, tuple[int, ...]]
    """Category to the bytes alive after each op."""
    peak_at: int
    """The first op after which the most is alive."""
    peak_holds: tuple[LiveStorage, ...]
    """All storages alive then, the largest first."""
    kinds: Mapping[str, str]
    """Owner to its class, in the model's order; empty for owners that are no module."""
    why_real: str | None = None
    """Why the step ran on real tensors; None for fake ones."""

    @classmethod
    def of(
        cls,
        storages: Sequence[LiveStorage],
        points: Sequence[MemoryPoint],
        kinds: Mapping[str, str],
    ) -> StepMemory:
        """The sums.

        Raises:
            ValueError: no points.
        """
        if not points:
            raise ValueError("no op ran: there is no step to count")
        timeline = {
            category: _alive_after(len(points), (h for h in storages if h.category == category))
            for category in MEMORY_CATEGORIES
        }
        totals = [sum(row) for row in zip(*timeline.values(), strict=True)]
        at = totals.index(max(totals))
        alive = sorted((h for h in storages if h.alive_at(at)), key=lambda h: -h.nbytes)
        return cls(tuple(points), timeline, at, tuple(alive), kinds)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return sum(self.categories.values())

    @property
    def categories(self) -> dict[str, int]:
        """Bytes at the peak by category; they sum to it."""
        return {category: row[self.peak_at] for category, row in self.timeline.items()}

    @property
    def totals(self) -> dict[str, int]:
        """`peak` and the categories, as a record's `memory_bytes` has them."""
        return {"peak": self.peak_bytes, **self.categories}

    @cached_property
    def modules(self) -> dict[str, dict[str, int]]:
        """Owner to its bytes at the peak by category, in the model's order; none without any."""
        rows = {owner: dict.fromkeys(MEMORY_CATEGORIES, 0) for owner in self.kinds}
        for h in self.peak_holds:
            rows[h.owner][h.category] += h.nbytes
        return {owner: row for owner, row in rows.items() if any(row.values())}

    @property
    def phase_peaks(self) -> dict[str, int]:
        """Phase to the most bytes alive after one of its ops."""
        peaks: dict[str, int] = {}
        for point, row in zip(self.points, zip(*self.timeline.values(), strict=True), strict=True):
            peaks[point.phase] = max(peaks.get(point.phase, 0), sum(row))
        return peaks

    @property
    def peak(self) -> MemoryPeak:
        """The op after which the most is alive."""
        op, phase, owner = self.points[self.peak_at]
        return MemoryPeak(self.peak_at, op, phase, owner)

    def module_rows(self) -> list[ModuleMemory]:
        """The memory of each owner at the peak."""
        return [
            ModuleMemory(owner, self.kinds[owner], sum(row.values()), **row)
            for owner, row in self.modules.items()
        ]

    def largest(self, count: int = 10) -> list[StorageMemory]:
        """The largest storages at the peak."""
        return [
            StorageMemory(h.nbytes, h.category, h.owner, list(h.shape), dtype_name(h.dtype))
            for h in self.peak_holds[:count]
        ]

    def timeline_rows(self) -> MemoryTimeline:
        """The timeline as recorded."""
        op, phase, module = map(list, zip(*self.points, strict=True))
        rows = {category: list(row) for category, row in self.timeline.items()}
        return MemoryTimeline(op, phase, module, **rows)


def _alive_after(points: int, storages: Iterable[LiveStorage]) -> tuple[int, ...]:
    """Bytes alive after each of `points` ops."""
    changes = [0] * (points + 1)
    for h in storages:
        changes[min(h.born, points)] += h.nbytes
        if h.died is not None:
            changes[min(h.died, points)] -= h.nbytes
    return tuple(accumulate(changes[:points]))


# A bucket of DistributedDataParallel is complete with so many bytes (PyTorch's defaults). The first
# is a small one, so that sending begins early in the backward pass
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
ROOT = ""  # The unit of everything outside of blocks


# Turns the storages of a step in a single process into those of one of several; the largest chunks,
# where they differ
ProcessRule = Callable[[Sequence[LiveStorage], Sequence[MemoryPoint]], Sequence[LiveStorage]]


def one_process(
    storages: Sequence[LiveStorage], points: Sequence[MemoryPoint]
) -> Sequence[LiveStorage]:
    """The rule without other processes: the same."""
    return storages


@dataclass(frozen=True)
class ReplicatedModel:
    """DDP: each process has the whole model, and gradients are summed during the backward pass.

    Gradients lie in buckets, which stay from step to step.
    """

    reduce_itemsize: int  # Bytes of a number in the reduction

    def __call__(
        self, storages: Sequence[LiveStorage], points: Sequence[MemoryPoint]
    ) -> Sequence[LiveStorage]:
        """The same, with gradients in buckets."""
        visits = _BlockVisits(points)
        last = {p.owner: n for n, p in enumerate(points) if p.phase == "backward"}
        gradients = [h for h in visits.in_step(storages) if h.category == "gradients"]
        # Temporary between the op that makes it and its copy into the bucket
        copied_at = [max(h.born, last.get(h.owner, h.born)) for h in gradients]
        copies = [
            replace(h, category="temporary", died=at + 1)
            for h, at in zip(gradients, copied_at, strict=True)
        ]
        others = [h for h in storages if h.category != "gradients"]
        buckets = [replace(h, born=0, died=None) for h in gradients]
        return [*others, *copies, *buckets, *self._converted(gradients, copied_at, visits.end)]

    def _converted(
        self, gradients: Sequence[LiveStorage], copied_at: Sequence[int], end: int
    ) -> Iterator[LiveStorage]:
        """Buckets in the dtype of the sum; they fill in the order of the backward pass."""
        limit, filled, nbytes, at = FIRST_BUCKET_BYTES, 0, 0, 0
        for h, at in sorted(zip(gradients, copied_at, strict=True), key=itemgetter(1)):
            filled += h.nbytes
            if h.dtype.itemsize != self.reduce_itemsize:
                nbytes += _numel(h) * self.reduce_itemsize
            if filled >= limit:
                # at most until the end of the backward pass: it is freed when it is sent
                yield _flat(nbytes, at, end + 1, ROOT)
                limit, filled, nbytes = BUCKET_BYTES, 0, 0
        yield _flat(nbytes, at, end + 1, ROOT)


@dataclass(frozen=True)
class ShardedModel:
    """FSDP2: each process has a part of each parameter, and gathers a block where it runs.

    A unit is a block of the model (`model_blocks.py`), or all else. Its parameters, gradients and
    state are cut along dimension 0. Gathered parameters, whole gradients and what is reduced count
    as temporary. The rules are those of PyTorch's `fully_shard` with its defaults (2.15); tests
    compare with it. That of 2.12 holds a unit's reduction for one block longer.
    """

    world_size: int
    blocks: Sequence[str]  # Paths of the blocks
    gathered_itemsizes: Mapping[str, int]
    """Module to the bytes of a number of its gathered parameters, where they are cast."""
    reduce_itemsize: int  # Bytes of a number in the reduction

    def __call__(
        self, storages: Sequence[LiveStorage], points: Sequence[MemoryPoint]
    ) -> Sequence[LiveStorage]:
        """Parts of the model, gathered blocks, and what a unit reduces."""
        visits = _BlockVisits(points, self.blocks)
        held = self._without_casts(visits.in_step(storages), points)
        parts = [part for h in held for part in self._parts(h, visits)]
        gathered = self._unit_bytes(held, "parameters", self._compute_itemsize, visits)
        reduced = self._unit_bytes(held, "gradients", lambda _: self.reduce_itemsize, visits)
        return [
            *parts,
            *self._gathered(gathered, visits),
            *self._reductions(reduced, gathered, visits),
        ]

    def _without_casts(
        self, storages: Sequence[LiveStorage], points: Sequence[MemoryPoint]
    ) -> list[LiveStorage]:
        """The storages without autocast's copies of parameters, and the gradients of those.

        FSDP2 gathers the parameters in the dtype of autocast, so nothing is left to cast.
        """
        cast = [h for h in storages if h.cast_of is not None and h.owner in self.gathered_itemsizes]
        copied = {id(h.cast_of) for h in cast if h.category == "gradients"}
        copies = {
            id(h)
            for h in cast
            if h.cast_of is not None
            and h.cast_of.category == "parameters"
            and points[h.born].phase in ("forward", "backward")
        }
        return [h for h in storages if id(h) not in copied | copies]

    def _parts(self, h: LiveStorage, visits: _BlockVisits) -> Iterator[LiveStorage]:
        part = replace(h, nbytes=h.nbytes * self._rows(h) // _rows(h))
        if h.category in ("parameters", "optimizer_state"):
            yield part
        elif h.category == "gradients":
            at = visits.reduced_at(h)
            if h.born <= at:  # whole until its unit's backward pass ends; then the part is left
                whole_bytes = _numel(h) * self._compute_itemsize(h)
                until = at + 1 if h.died is None else min(at + 1, h.died)
                is_cast = h.cast_of is not None and h.owner in self.gathered_itemsizes
                born = h.cast_of.born if is_cast and h.cast_of is not None else h.born
                yield replace(h, nbytes=whole_bytes, category="temporary", born=born, died=until)
                part.born = at + 1
            if part.died is None or part.born < part.died:
                yield part
        elif h.category == "temporary" and h.born > visits.end:  # of the optimizer
            yield part
        else:
            yield h

    def _gathered(self, sizes: Mapping[str, int], visits: _BlockVisits) -> Iterator[LiveStorage]:
        # Outside of blocks: from the first op of the forward pass to the end of the backward pass
        yield _flat(sizes[ROOT], visits.begin, visits.end + 1, ROOT)
        before = None
        for visit in visits.visits:
            born = visit.first
            if before is not None:  # gathered in advance, while the block before it runs (prefetch)
                born = before.first if before.unit != visit.unit else before.last + 1
            yield _flat(sizes[visit.unit], born, visit.last + 1, visit.unit)
            before = visit

    def _reductions(
        self, sizes: Mapping[str, int], gathered: Mapping[str, int], visits: _BlockVisits
    ) -> Iterator[LiveStorage]:
        backward = [visit for visit in visits.visits if visit.is_backward]
        ends = [*(visit.last for visit in backward[1:]), visits.end]
        before = 0
        for (unit, _, _, last), died in zip(backward, ends, strict=False):  # without any, one end
            # The copy is made when the block's parameters and the copy before are gone.
            more = max(0, sizes[unit] - gathered[unit] - before)
            yield _flat(more, last, last + 1, unit)
            # A flat copy in the reduction's dtype, until the next block's backward pass is over
            yield _flat(sizes[unit], last + 1, max(died, last) + 1, unit)
            before = sizes[unit]
        more = max(0, sizes[ROOT] - gathered[ROOT] - before)
        yield _flat(more, visits.end, visits.end + 1, ROOT)

    def _unit_bytes(
        self,
        held: Sequence[LiveStorage],
        category: str,
        itemsize: Callable[[LiveStorage], int],
        visits: _BlockVisits,
    ) -> dict[str, int]:
        """Unit to the bytes of its parameters or gradients, the chunks of all processes."""
        sizes = dict.fromkeys((*self.blocks, ROOT), 0)
        for h in held:
            if h.category == category:
                sizes[visits.unit(h.owner)] += self._padded(h) * itemsize(h)
        return sizes

    def _rows(self, h: LiveStorage) -> int:
        """Rows of the largest chunk."""
        return ceil(_rows(h) / self.world_size)

    def _padded(self, h: LiveStorage) -> int:
        """Numbers in the chunks of all processes: all are as large as the largest."""
        if not h.shape:
            return _numel(h)
        return _numel(h) // _rows(h) * self._rows(h) * self.world_size

    def _compute_itemsize(self, h: LiveStorage) -> int:
        own = h.dtype.itemsize
        return min(own, self.gathered_itemsizes.get(h.owner, own))


class _Visit(NamedTuple):
    """Ops of one block, one after the other, in one pass."""

    unit: str
    is_backward: bool
    first: int
    last: int


class _BlockVisits:
    """When the blocks of a step run."""

    def __init__(self, points: Sequence[MemoryPoint], blocks: Sequence[str] = ()) -> None:
        self.unit = cache(lambda owner: _unit(owner, blocks))
        numbered = [(n, p) for n, p in enumerate(points) if p.phase in ("forward", "backward")]
        self.begin = numbered[0][0] if numbered else 0
        self.end = max((n for n, p in numbered if p.phase == "backward"), default=0)
        """The last op of the backward pass."""
        self.visits: list[_Visit] = []
        for n, point in numbered:
            self._visit(n, self.unit(point.owner), point.phase == "backward")

    def in_step(self, storages: Iterable[LiveStorage]) -> list[LiveStorage]:
        """Those that are not gone before the forward pass, as gradients of the step before."""
        return [h for h in storages if h.died is None or h.died > self.begin]

    def reduced_at(self, gradient: LiveStorage) -> int:
        """The op after which a gradient is reduced with its unit, the first time in a step.

        Smaller than `gradient.born` for a gradient that an earlier step left.
        """
        if gradient.born <= self.begin:
            return -1
        unit = self.unit(gradient.owner)
        ends = (v.last for v in self.visits if v.is_backward and v.unit == unit)
        return next((n for n in ends if n >= gradient.born), max(self.end, gradient.born))

    def _visit(self, n: int, unit: str, is_backward: bool) -> None:
        if unit == ROOT:
            return
        last = self.visits[-1] if self.visits else None
        if last is not None and (last.unit, last.is_backward) == (unit, is_backward):
            self.visits[-1] = last._replace(last=n)
        else:
            self.visits.append(_Visit(unit, is_backward, n, n))


def _unit(owner: str, blocks: Iterable[str]) -> str:
    return next((b for b in blocks if owner == b or owner.startswith(f"{b}.")), ROOT)


def _flat(nbytes: int, born: int, died: int, owner: str) -> LiveStorage:
    return LiveStorage(nbytes, "temporary", owner, born, (nbytes,), torch.uint8, died)


def _rows(h: LiveStorage) -> int:
    return max(h.shape[0], 1) if h.shape else 1


def _numel(h: LiveStorage) -> int:
    return h.nbytes // h.dtype.itemsize
