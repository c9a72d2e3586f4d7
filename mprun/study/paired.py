"""Two arms of an experiment, paired by seed: mean difference, its intervals, a verdict.

Equivalent: the 90 % interval (Student's t) of the mean difference lies inside the margin, which is
two one-sided tests at 5 % (Schuirmann, 1987). Otherwise worse or better: the 95 % interval leaves
out zero. Otherwise inconclusive.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from mprun.comparison.rows import Estimate, Interval, Verdict

MOST_SEEDS = 200
"""More than this many are not recommended to anybody."""


class Metric(NamedTuple):
    """What the arms are judged by."""

    name: str
    """accuracy or loss."""
    higher_is_better: bool
    is_relative: bool
    """Whether differences are shares of the base's mean (losses) or plain (accuracies)."""
    margin: float
    """Differences inside plus and minus this do not matter."""


class Paired(NamedTuple):
    """What the pairs say."""

    difference: Estimate
    """The mean of the other arm less the base, with its 95 % interval."""
    equivalence: Interval | None
    """Its 90 % interval."""
    verdict: Verdict


def compare(other: Sequence[float], base: Sequence[float], metric: Metric) -> Paired:
    """Set an arm against the base; entries with one index are one seed's.

    Args:
        other: the arm that is judged; NaN where its training failed.
        base: the arm it is judged by, finite.
        metric: what the numbers are.
    """
    n, whole = len(base), (abs(statistics.fmean(base)) if metric.is_relative else 0) or 1
    differences = [(o - b) / whole for o, b in zip(other, base, strict=True)]
    if failed := sum(not math.isfinite(d) for d in differences):
        said = f"{failed} of {n} trainings failed"
        return Paired(Estimate(math.nan, None, n), None, Verdict("worse", said))
    mean = statistics.fmean(differences)
    if n < 2:
        verdict = Verdict("inconclusive", "one pair has no spread to judge by", more_seeds=1)
        return Paired(Estimate(mean, None, n), None, verdict)
    spread = statistics.stdev(differences)
    wide, narrow = _interval(mean, spread, n, 0.95), _interval(mean, spread, n, 0.90)
    return Paired(Estimate(mean, wide, n), narrow, _verdict(mean, spread, n, metric))


def _verdict(mean: float, spread: float, n: int, metric: Metric) -> Verdict:
    if _is_inside(mean, spread, n, metric.margin):
        return Verdict("equivalent", "the 90 % interval lies inside the margin")
    if _is_apart(mean, spread, n):
        better = (mean > 0) == metric.higher_is_better
        return Verdict("better" if better else "worse", "the 95 % interval leaves out zero")
    settled = (
        k - n
        for k in range(n + 1, n + MOST_SEEDS + 1)
        if _is_inside(mean, spread, k, metric.margin) or _is_apart(mean, spread, k)
    )
    said = "the intervals reach beyond the margin, and hold zero"
    return Verdict("inconclusive", said, next(settled, None))


def _is_inside(mean: float, spread: float, n: int, margin: float) -> bool:
    low, high = _interval(mean, spread, n, 0.90)
    return -margin < low and high < margin


def _is_apart(mean: float, spread: float, n: int) -> bool:
    low, high = _interval(mean, spread, n, 0.95)
    return low > 0 or high < 0


def _interval(mean: float, spread: float, n: int, confidence: float) -> Interval:
    from scipy.special import stdtrit

    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * spread / math.sqrt(n)
    return Interval(mean - half, mean + half)
