"""What a ratio of times or throughputs says, and what it leaves open.

A ratio is a geometric mean over pairs with a 95 % interval, and that interval is all there is to
say: it leaves out 1, or it lies within a factor of `SAME` of 1, or nothing is known. An interval
that reaches farther than a factor of `WIDE` from the ratio does not tell the ratio's size either.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from mprun.compare.rows import Estimate
from mprun.compare.statistics import Sample, fewest_further, half_width

WIDE = 1.5
"""An interval that reaches beyond this factor from its ratio tells too little: more runs needed."""

SAME = 1.05
"""Ratios between 1 / 1.05 and 1.05 are called the same speed: a twentieth seldom decides."""

Word = Literal["higher", "lower", "same", "open"]


class Size(NamedTuple):
    """What is known of a ratio."""

    word: Word
    """higher or lower than 1, the same within `SAME`, or open."""
    is_wide: bool
    """Whether the interval, if there is one, reaches beyond `WIDE`."""
    more_seeds: int | None
    """About how many further seeds would settle what is open: whether it differs from 1, else its
    size. None if nothing is open, or if no number can be given."""


def size(ratio: Estimate) -> Size:
    """What the interval of a ratio says."""
    if ratio.interval is None:
        return Size("open", True, None)
    low, high = ratio.interval
    sample = _logarithms(ratio, high)
    is_wide = high > WIDE * ratio.value
    if low > 1 or high < 1:
        word: Word = "higher" if low > 1 else "lower"
        return Size(word, is_wide, fewest_further(sample, _is_narrow) if is_wide else None)
    if low > 1 / SAME and high < SAME:
        return Size("same", is_wide, None)
    return Size("open", is_wide, fewest_further(sample, _tells))


def _logarithms(ratio: Estimate, high: float) -> Sample:
    """What the ratio was made of: its interval is symmetric in logarithms."""
    unit = half_width(Sample(ratio.n, 0.0, 1.0))
    mean = math.log(ratio.value)
    return Sample(ratio.n, mean, max(0.0, math.log(high) - mean) / unit)


def _is_narrow(logarithms: Sample) -> bool:
    return half_width(logarithms) <= math.log(WIDE)


def _tells(logarithms: Sample) -> bool:
    """Whether the ratio differs from 1, or is the same within `SAME`."""
    mean, half = abs(logarithms.mean), half_width(logarithms)
    return mean > half or mean + half < math.log(SAME)
