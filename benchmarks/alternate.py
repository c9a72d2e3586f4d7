"""Comparing two pieces of work on a machine that drifts: turn by turn, ratio of medians, interval.

glibc gives memory at the top of its heap back to the system and faults it in again, or does not,
depending on what small object happens to lie there: with several models in one process that is a
lottery worth up to half a step (8,000 page faults a step in one loop and none in the other,
changing sides with the length of the blocks). So benchmarks call `steady_heap`, for both sides.
What a user has without asking is the heap as it is: where it matters, a benchmark measures under
both `HEAPS`, in processes of their own, because glibc reads its environment once.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

BLOCKS = 100
RESAMPLES = 2000

HEAPS: Mapping[str, Mapping[str, str]] = {
    "as it is": {},
    "steady": {"MALLOC_TRIM_THRESHOLD_": "4294967295", "MALLOC_MMAP_MAX_": "0"},
}
"""Name of a heap to the environment that glibc reads at the start of a process (mallopt(3))."""


class Ratio(NamedTuple):
    """Medians of two alternating measurements, and their ratio with its 95 % interval."""

    base_ms: float
    other_ms: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.base_ms:8.3f} ms, {self.other_ms:8.3f} ms, "
            f"ratio {self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"
        )


def alternate(base: Iterator[float], other: Iterator[float], blocks: int = BLOCKS) -> Ratio:
    """Take a time in seconds from each in turn, the first of each dropped."""
    next(base), next(other)
    a: list[float] = []
    b: list[float] = []
    for block in range(blocks):
        pair = ((base, a), (other, b)) if block % 2 else ((other, b), (base, a))
        for source, times in pair:
            times.append(next(source))

    return compared(a, b)


def compared(base_s: Sequence[float], other_s: Sequence[float]) -> Ratio:
    """Medians of times that were taken in turns, and their ratio."""

    def ratio(index: list[int]) -> float:
        other = statistics.median(other_s[i] for i in index)
        return other / statistics.median(base_s[i] for i in index)

    blocks = len(base_s)
    low, high = interval(ratio, blocks)
    middle = ratio(list(range(blocks)))
    medians_ms = statistics.median(base_s) * 1e3, statistics.median(other_s) * 1e3
    return Ratio(*medians_ms, middle, low, high)


def interval(ratio: Callable[[list[int]], float], n: int) -> tuple[float, float]:
    """95 % bootstrap interval of a statistic of block indices."""
    rng = random.Random(0)
    ratios = sorted(ratio([rng.randrange(n) for _ in range(n)]) for _ in range(RESAMPLES))
    return ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES)]


def heap_environment(heap: str) -> dict[str, str]:
    """This process's environment with the variables of one of `HEAPS`, and no other of malloc."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    kept.pop("GLIBC_TUNABLES", None)
    return {**kept, **HEAPS[heap]}
