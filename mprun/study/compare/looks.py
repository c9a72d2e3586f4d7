"""When a study looks at its verdicts, so that looking often makes no claim false more often.

Whoever adds seeds until a verdict comes tests again and again, and each test has its own chance of
a false claim: looks after 4, 7, 10, 15 and 20 pairs at 5 % each make 8 to 13 % of them. So the
looks and their levels are fixed before the first run:

    looks      after n_1 < n_2 < ... < n_K pairs; n_K is the limit
    level      a_k = ALPHA sqrt(n_k) / (sqrt(n_1) + ... + sqrt(n_K))

The levels add up to ALPHA, so whatever the data, the chance of a false claim at any look is at most
ALPHA (Bonferroni's bound over the looks; Holm's method over the modes of a look, whose rejected
hypotheses leave the family for good: Maurer and Bretz 2013). Later looks know more and get more.
A mode that was settled at a look gets no more runs. Neither does a `hopeless` one, whose chance to
be settled at the last look is below `HOPELESS`: the mean of N pairs, given n with mean m and
standard deviation s, is m + s sqrt(1/n - 1/N) T, T of Student's distribution with n - 1 degrees of
freedom. Simulated by `benchmarks/error_rates.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from scipy.special import stdtr

from mprun.study.compare.statistics import ALPHA, Sample, half_width

LOOKS = (4, 7, 10, 15, 20, 30, 45, 70)  # Pairs; beyond them, each look has half as many again
HOPELESS = 0.05


class Look(NamedTuple):
    """One of the looks of a plan."""

    pairs: int
    level: float  # The chance of a false claim that it adds, in each family of tests


class PlannedLooks(NamedTuple):
    """The looks of a study."""

    seeds: tuple[int, ...]  # In the order of the runs
    looks: tuple[Look, ...]


def planned_looks(limit: int) -> tuple[Look, ...]:
    """The looks of a study of at most `limit` pairs, with their levels."""
    pairs = [n for n in _places(limit) if n < limit] + [limit]
    total = sum(map(math.sqrt, pairs))
    return tuple(Look(n, ALPHA * math.sqrt(n) / total) for n in pairs)


def _places(limit: int) -> Iterator[int]:
    yield from LOOKS
    n = LOOKS[-1]
    while n < limit:
        n += n // 2
        yield n


def chance_to_settle(sample: Sample, margin: float, last: Look) -> float:
    """The chance that the last look settles a verdict, given the pairs so far, two or more.

    It is that of a mode alone, which has the whole level, so no mode is given up too early.
    """
    final = sample._replace(n=last.pairs)
    inside = margin - half_width(final, 1 - 2 * last.level)
    outside = half_width(final, 1 - last.level)
    spread = sample.sd * math.sqrt(1 / sample.n - 1 / last.pairs)
    if spread == 0:
        return float(abs(sample.mean) <= inside or abs(sample.mean) > outside)

    def below(x: float) -> float:
        return float(stdtr(sample.n - 1, (x - sample.mean) / spread))

    near = min(inside, outside)  # what is inside and outside counts once
    return below(-outside) + 1 - below(outside) + max(0.0, below(near) - below(-near))
