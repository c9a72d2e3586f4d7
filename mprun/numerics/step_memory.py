"""The memory alive during a training step: sums over the storages of a `MemoryRecorder`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from mprun.records.memory_record import MemoryPeak, MemoryTimeline, ModuleMemory, StorageMemory
from mprun.records.run_record import MEMORY_CATEGORIES


@dataclass(slots=True)
class LiveStorage:
    """A storage: memory that one tensor or several share."""

    nbytes: int
    category: str
    """One of `MEMORY_CATEGORIES`."""
    owner: str
    """Path of the module it belongs to, or one of `(inputs)`, `(loss)`, `(optimizer)`."""
    born: int
    """The first point at which it is alive."""
    shape: tuple[int, ...]
    """The shape of the first tensor on it."""
    dtype: str
    died: int | None = None
    """The first point at which it is no longer alive; None where it outlives the step."""
    cast_of: LiveStorage | None = None
    """The storage whose numbers it has in another dtype, where one cast made it."""

    def alive_at(self, point: int) -> bool:
        """Whether it is alive right after op number `point`."""
        return self.born <= point and (self.died is None or point < self.died)


class MemoryPoint(NamedTuple):
    """An op of the step: memory is counted right after it."""

    op: str
    """ATen's name."""
    phase: str
    """forward, backward, optimizer, or other (loss, loss scale, clipping)."""
    owner: str
    """As in `LiveStorage`."""


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
            StorageMemory(
                h.nbytes, h.category, h.owner, list(h.shape), h.dtype.removeprefix("torch.")
            )
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
