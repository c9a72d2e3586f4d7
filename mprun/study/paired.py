"""Losses of two arms of an experiment, paired by seed: difference, intervals, verdict.

Differences are relative to the mean of the base. Equivalent: the 90 % interval (Student's t) of the
mean difference lies inside the margin, which is two one-sided tests at 5 % (Schuirmann, 1987).
Otherwise worse or better: the 95 % interval leaves out zero. Otherwise inconclusive.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from mprun.comparison.rows import Estimate, Interval, Verdict

MOST_SEEDS = 200
"""More than this many are not recommended to anybody."""


class Paired(NamedTuple):
    """What pairs of losses say."""

    difference: Estimate
    """Mean relative difference, less is better, with its 95 % interval."""
    equivalence: Interval | None
    """Its 90 % interval."""
    verdict: Verdict


def compare(other: Sequence[float], base: Sequence[float], margin: float) -> Paired:
    """Set losses against those of the base; entries with one index are one seed's.

    Args:
        other: losses of the arm that is judged; NaN where its training failed.
        base: losses of the arm it is judged by; finite, and their mean is not zero.
        margin: relative differences inside plus and minus this do not matter.
    """
    n, whole = len(base), statistics.fmean(base)
    differences = [(o - b) / whole for o, b in zip(other, base, strict=True)]
    failed = sum(not math.isfinite(d) for d in differences)
    if failed:
        said = f"{failed} of {n} trainings ended in a loss that is no number"
        return Paired(Estimate(math.nan, None, n), None, Verdict("worse", said))
    mean = statistics.fmean(differences)
    if n < 2:
        said = "one pair of trainings has no spread to judge by"
        verdict = Verdict("inconclusive", said, more_seeds=2)
        return Paired(Estimate(mean, None, n), None, verdict)
    error = statistics.stdev(differences) / math.sqrt(n)
    wide, narrow = _interval(mean, error, n, 0.95), _interval(mean, error, n, 0.90)
    return Paired(Estimate(mean, wide, n), narrow, _verdict(mean, error, n, margin))


def _verdict(mean: float, error: float, n: int, margin: float) -> Verdict:
    wide, narrow = _interval(mean, error, n, 0.95), _interval(mean, error, n, 0.90)
    if -margin < narrow.low and narrow.high < margin:
        return Verdict("equivalent", f"the 90 % interval lies inside {margin:.1%}")
    if wide.low > 0 or wide.high < 0:
        return Verdict("worse" if mean > 0 else "better", "the 95 % interval leaves out zero")
    spread = error * math.sqrt(n)
    enough = (k for k in range(n, MOST_SEEDS) if _settles(mean, spread, k, margin))
    total = next(enough, None)
    more = None if total is None else max(1, total - n)
    return Verdict("inconclusive", "the intervals hold both zero and the margin", more)


def _settles(mean: float, spread: float, n: int, margin: float) -> bool:
    low, high = _interval(mean, spread / math.sqrt(n), n, 0.90)
    wide = _interval(mean, spread / math.sqrt(n), n, 0.95)
    return (-margin < low and high < margin) or wide.low > 0 or wide.high < 0


def _interval(mean: float, error: float, n: int, confidence: float) -> Interval:
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, n - 1)) * error
    return Interval(mean - half, mean + half)
