"""The statistics of a comparison: paired differences, intervals, tests, several variants at once.

Seeds change an accuracy more than a precision does, and two runs of one seed share weights and
batches, so a mode is compared with the baseline seed by seed. The differences d_1 .. d_n are
treated as independent draws from one normal distribution; with mean m and standard deviation s:

    interval       m +- t s / sqrt(n), t Student's quantile with n - 1 degrees of freedom
    difference     is the mean 0? two-sided p = 2 P(T < -|m| / (s / sqrt(n)))
    equivalence    is the mean inside +- margin? The larger p of two one-sided tests (TOST;
                   Schuirmann 1987): P(T < (|m| - margin) / (s / sqrt(n)))

"No significant difference" is no evidence of equality, so there are two tests. Holm's adjustment
(1979) keeps the chance of any false claim in a family of tests at 5 %. Ratios of times are averaged
as logarithms. `scipy.special` takes half a second less to import than `scipy.stats`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy.special import stdtr, stdtrit

from mprun.study.compare.comparison import Estimate, Interval

ALPHA = 0.05  # The chance of a false claim that is accepted, in each family of tests

# The level of the intervals shown; the interval of equivalence has 1 - 2 ALPHA
CONFIDENCE = 1 - ALPHA

MAX_SEEDS = 1000  # Beyond this many further seeds a verdict is out of reach


class Sample(NamedTuple):
    """`n` numbers as their mean and standard deviation (NaN for one number)."""

    n: int
    mean: float
    sd: float

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.sd / math.sqrt(self.n)


def summarise(values: Sequence[float], resolution: float = 0.0) -> Sample:
    """Mean and standard deviation of one or more finite numbers.

    `resolution` is their smallest step (one sample of the test set for accuracies). Rounding to it
    alone has the standard deviation resolution / sqrt(12). A smaller one, of two differences that
    happen to agree for example, is replaced by it.
    """
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Sample(n, mean, math.nan)
    sd = math.sqrt(math.fsum((x - mean) * (x - mean) for x in values) / (n - 1))
    return Sample(n, mean, max(sd, resolution / math.sqrt(12)))


def interval(sample: Sample, level: float = CONFIDENCE) -> Interval | None:
    """The t interval of the mean; None for fewer than two numbers."""
    if sample.n < 2:
        return None
    half = half_width(sample, level)
    return Interval(sample.mean - half, sample.mean + half)


def half_width(sample: Sample, level: float = CONFIDENCE) -> float:
    """Half the width of the t interval of the mean of two numbers or more."""
    return float(stdtrit(sample.n - 1, (1 + level) / 2)) * sample.error


def estimate(sample: Sample) -> Estimate:
    """The mean with its 95 % interval."""
    return Estimate(sample.mean, interval(sample), sample.n)


def geometric_mean(ratios: Sequence[float]) -> Estimate:
    """The geometric mean of one or more positive ratios with its 95 % interval."""
    logs = estimate(summarise([math.log(x) for x in ratios]))
    around = logs.interval and Interval(*map(_exp, logs.interval))
    return Estimate(_exp(logs.value), around, logs.n)


def _exp(x: float) -> float:
    """e to the x, limited to the largest float."""
    return math.exp(min(x, 709.0))


def difference_p(sample: Sample) -> float:
    """Two-sided p-value of "the mean is 0", for two numbers or more."""
    return 2 * _below(-abs(sample.mean), sample)


def equivalence_p(sample: Sample, margin: float) -> float:
    """p-value of "the mean is not inside plus and minus margin", for two numbers or more."""
    return _below(abs(sample.mean) - margin, sample)


def _below(distance: float, sample: Sample) -> float:
    """P(T < distance / standard error); without any spread it is 0, a half or 1."""
    if sample.sd == 0:
        return 0.5 if distance == 0 else float(distance > 0)
    return float(stdtr(sample.n - 1, distance / sample.error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given.

    The smallest of k is multiplied by k, the next by k - 1 and so on; each is at least the one
    before it and at most 1.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def holm_levels(p_values: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """The level at which Holm's method decides on each hypothesis, in the order given.

    The smallest of k p-values is compared with alpha / k, the next with alpha / (k - 1) and so on,
    until one is larger. That one and all after it are not rejected; they get the level of that
    step. So `p <= level` exactly if the adjusted p-value is at most alpha.
    """
    k, levels = len(p_values), [0.0] * len(p_values)
    adjusted = holm(p_values)
    left = sum(p > alpha for p in adjusted)
    for rank, index in enumerate(sorted(range(k), key=p_values.__getitem__)):
        levels[index] = alpha / max(k - rank, left)
    return levels


def seeds_to_settle(
    sample: Sample, margin: float, equivalence: float = ALPHA, difference: float = ALPHA
) -> int | None:
    """How many further numbers would settle a verdict if mean and spread did not change.

    A verdict is settled if the mean is shown to lie inside the margin, or to differ from 0, by
    tests at the levels `equivalence` and `difference`. The number is approximate: the spread of a
    few numbers is only known to a factor of about two. None: more than `MAX_SEEDS` are needed.
    """
    mean = abs(sample.mean)

    def settles(larger: Sample) -> bool:
        inside = mean + half_width(larger, 1 - 2 * equivalence) <= margin
        apart = mean - half_width(larger, 1 - difference) >= 0
        return (inside and mean < margin) or (apart and mean > 0)

    return fewest_further(sample, settles)


def fewest_further(sample: Sample, settles: Callable[[Sample], bool]) -> int | None:
    """How many further numbers of the same mean and spread settle a question; None: too many."""
    if sample.n < 2:
        return None
    counts = range(1, MAX_SEEDS + 1)
    further = 1 + bisect_left(counts, True, key=lambda n: settles(sample._replace(n=sample.n + n)))
    return further if further <= MAX_SEEDS else None
