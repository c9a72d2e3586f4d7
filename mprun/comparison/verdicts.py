"""From paired differences to verdicts.

A variant is `equivalent` where it is shown to lie inside the margin, else `worse` or `better` where
it is shown to differ, else `inconclusive`. The tests of equivalence over all variants are one
family, those of a difference another; p-values are adjusted within each by Holm's method, the
intervals beside them are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mprun.comparison.rows import Verdict, Word
from mprun.comparison.statistics import (
    ALPHA,
    CONFIDENCE,
    Sample,
    difference_p,
    equivalence_p,
    holm,
    interval,
    seeds_to_settle,
)


@dataclass(frozen=True)
class Evidence:
    """What the verdict on a variant rests on."""

    sample: Sample | None
    """Paired differences, the variant less the baseline; None where no seed is in common."""
    margin: float
    """What does not matter, in the unit of the differences."""
    unit: str
    """points, % or nothing: differences of accuracies, shares, plain differences."""
    failure: str = ""
    """Why the variant is worse whatever the differences: runs that failed or diverged."""

    @property
    def tested(self) -> bool:
        """Whether a spread is known."""
        return not self.failure and self.sample is not None and self.sample.n > 1


def judge(evidence: Sequence[Evidence], higher_is_better: bool) -> list[Verdict]:
    """A verdict on each variant, all of them together.

    Args:
        evidence: one for each variant but the baseline.
        higher_is_better: whether a positive difference is good.
    """
    samples = [(e.sample, e.margin) for e in evidence if e.tested and e.sample is not None]
    equal = holm([equivalence_p(sample, margin) for sample, margin in samples])
    apart = holm([difference_p(sample) for sample, _ in samples])
    family = _Family(len(samples), _left(equal), _left(apart))
    tests = iter(zip(equal, apart, strict=True))
    return [
        _judge(e, *next(tests), family, higher_is_better) if e.tested else _untested(e)
        for e in evidence
    ]


@dataclass(frozen=True)
class _Family:
    """How many variants were tested, and how many are not settled in each of the two families."""

    size: int
    unequal: int
    undecided: int

    @property
    def adjusted(self) -> str:
        return f" after Holm over {self.size} variants" if self.size > 1 else ""


def _left(p_values: Sequence[float]) -> int:
    """By how many Holm's method divides the level of the next hypothesis."""
    return max(1, sum(p > ALPHA for p in p_values))


def _untested(e: Evidence) -> Verdict:
    if e.failure:
        return Verdict("worse", e.failure)
    if e.sample is None:
        return Verdict("inconclusive", "no seed for which both have the metric")
    return Verdict(
        "inconclusive", "one seed in common with the baseline, which has no spread: two are needed"
    )


def _judge(
    e: Evidence, equal: float, apart: float, family: _Family, higher_is_better: bool
) -> Verdict:
    assert e.sample is not None
    narrow, wide = (_range(e, level) for level in (1 - 2 * ALPHA, CONFIDENCE))
    margin = amount(e.margin, e.unit)
    if equal <= ALPHA:
        text = f"the 90 % interval, {narrow}, lies inside the margin of {margin} ({_p(equal)}"
        return Verdict("equivalent", f"{text}{family.adjusted})")
    if apart <= ALPHA:
        word: Word = "better" if (e.sample.mean > 0) == higher_is_better else "worse"
        text = f"the 95 % interval, {wide}, does not hold 0 ({_p(apart)}{family.adjusted})"
        return Verdict(word, text)
    text = (
        f"neither inside the margin of {margin} ({_p(equal)}) nor apart from 0 ({_p(apart)})"
        f"{family.adjusted}; the 90 % interval is {narrow}"
    )
    levels = (ALPHA / family.unequal, ALPHA / family.undecided)
    return Verdict("inconclusive", text, seeds_to_settle(e.sample, e.margin, *levels))


def _range(e: Evidence, level: float) -> str:
    found = interval(e.sample, level) if e.sample is not None else None
    assert found is not None
    low, high = (f"{_number(x, e.unit):+.3g}" for x in found)
    return f"{low} to {high}{_suffix(e.unit)}"


def amount(value: float, unit: str) -> str:
    """A margin in words: `0.5 points`, `2 %`."""
    return f"{_number(value, unit):.3g}{_suffix(unit)}"


def _number(value: float, unit: str) -> float:
    return value * 100 if unit else value


def _suffix(unit: str) -> str:
    return f" {unit}" if unit else ""


def _p(value: float) -> str:
    return "p<0.001" if value < 0.001 else f"p={value:.3f}"
