"""The memory alive during a training step: sums over the storages `memory_recorder` saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

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
    """Of the first tensor on it."""
    dtype: str
    died: int | None = None
    """The first point at which it is no longer alive; None where it outlives the step."""

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
    """Everything alive then, the largest first."""
    kinds: Mapping[str, str]
    """Every owner in the model's order, with its class; empty for those that are no module."""

    @classmethod
    def of(
        cls, held: Sequence[LiveStorage], points: Sequence[MemoryPoint], kinds: Mapping[str, str]
    ) -> StepMemory:
        """The sums.

        Raises:
            ValueError: no points.
        """
        if not points:
            raise ValueError("no op ran: there is no step to count")
        timeline = {
            category: _alive_after(len(points), (h for h in held if h.category == category))
            for category in MEMORY_CATEGORIES
        }
        totals = [sum(row) for row in zip(*timeline.values(), strict=True)]
        at = totals.index(max(totals))
        alive = sorted((h for h in held if h.alive_at(at)), key=lambda h: -h.nbytes)
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

    def as_dict(self, largest: int = 10) -> dict[str, Any]:
        """Plain values, as `memory.json` has them, with the `largest` storages at the peak."""
        at = self.points[self.peak_at]
        return {
            "bytes": self.totals,
            "peak_at": {
                "point": self.peak_at,
                "op": at.op,
                "phase": at.phase,
                "module": at.owner,
            },
            "phase_peaks": self.phase_peaks,
            "modules": [
                {"module": owner, "kind": self.kinds[owner], "total": sum(row.values()), **row}
                for owner, row in self.modules.items()
            ],
            "largest": [
                {
                    "bytes": h.nbytes,
                    "category": h.category,
                    "module": h.owner,
                    "shape": list(h.shape),
                    "dtype": h.dtype.removeprefix("torch."),
                }
                for h in self.peak_holds[:largest]
            ],
            "timeline": {
                "op": [p.op for p in self.points],
                "phase": [p.phase for p in self.points],
                "module": [p.owner for p in self.points],
                **{category: list(row) for category, row in self.timeline.items()},
            },
        }


def _alive_after(points: int, held: Iterable[LiveStorage]) -> tuple[int, ...]:
    """Bytes alive after each of `points` ops."""
    changes = [0] * (points + 1)
    for h in held:
        changes[min(h.born, points)] += h.nbytes
        if h.died is not None:
            changes[min(h.died, points)] -= h.nbytes
    return tuple(accumulate(changes[:points]))
