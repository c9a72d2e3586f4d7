"""Two arms of an experiment, paired by seed, judged as `mprun compare` judges variants."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from mprun.compare.rows import Estimate, Interval, Verdict
from mprun.compare.statistics import ALPHA, estimate, interval, summarise
from mprun.compare.verdicts import Evidence, judge


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
    sample = summarise(differences)
    evidence = Evidence(sample, metric.margin, "%" if metric.is_relative else "points")
    (verdict,) = judge([evidence], metric.higher_is_better)
    return Paired(estimate(sample), interval(sample, 1 - 2 * ALPHA), verdict)
