"""From paired differences to verdicts.

A variant is `equivalent` where it is shown to lie inside the margin, else `worse` or `better` where
it is shown to differ, else `inconclusive`. The tests of equivalence over all variants are one
family, those of a difference another; p-values are adjusted within each by Holm's method. Each
verdict holds the interval that decided, at the level of Holm's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mprun.compare.digits import distinct_form, percent
from mprun.compare.rows import Interval, Verdict, Word
from mprun.compare.statistics import (
    ALPHA,
    Sample,
    difference_p,
    equivalence_p,
    holm,
    holm_levels,
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
    equal = _tests([equivalence_p(sample, margin) for sample, margin in samples])
    apart = _tests([difference_p(sample) for sample, _ in samples])
    tests = iter(zip(equal, apart, strict=True))
    return [
        _judge(e, *next(tests), len(samples), higher_is_better) if e.tested else _untested(e)
        for e in evidence
    ]


class _Test(NamedTuple):
    """One hypothesis of a family."""

    p: float
    """The p-value, adjusted."""
    level: float
    """What the p-value before its adjustment was compared with."""

    @property
    def rejects(self) -> bool:
        return self.p <= ALPHA


def _tests(p_values: Sequence[float]) -> list[_Test]:
    return list(map(_Test, holm(p_values), holm_levels(p_values)))


def _untested(e: Evidence) -> Verdict:
    if e.failure:
        return Verdict("worse", e.failure)
    if e.sample is None:
        return Verdict("inconclusive", "no seed for which both have the metric")
    return Verdict(
        "inconclusive", "one seed in common with the baseline, which has no spread: two are needed"
    )


def _judge(
    e: Evidence, equal: _Test, apart: _Test, variants: int, higher_is_better: bool
) -> Verdict:
    """The verdict with the interval that shows it, at the level of Holm's step.

    Of two tests that did not reject, the wider interval shows both: it reaches beyond the margin
    and holds 0.
    """
    assert e.sample is not None
    inside, off = 1 - 2 * equal.level, 1 - apart.level
    adjusted = f" after Holm over {variants} variants" if variants > 1 else ""
    margin = amount(e.margin, e.unit)
    if equal.rejects:
        found, shown = _interval(e, inside)
        text = f"{shown} lies inside the margin of {margin} ({_p(equal.p)}{adjusted})"
        return Verdict("equivalent", text, None, found, inside)
    if apart.rejects:
        word: Word = "better" if (e.sample.mean > 0) == higher_is_better else "worse"
        found, shown = _interval(e, off)
        return Verdict(word, f"{shown} does not hold 0 ({_p(apart.p)}{adjusted})", None, found, off)
    level = max(inside, off)
    found, shown = _interval(e, level)
    text = (
        f"neither inside the margin of {margin} ({_p(equal.p)}) nor apart from 0 ({_p(apart.p)})"
        f"{adjusted}; {shown} reaches beyond the margin and holds 0"
    )
    more = seeds_to_settle(e.sample, e.margin, equal.level, apart.level)
    return Verdict("inconclusive", text, more, found, level)


def _interval(e: Evidence, level: float) -> tuple[Interval, str]:
    """The interval of a level, and in words: `the 90 % interval, -0.2 to +0.3 points,`."""
    assert e.sample is not None
    found = interval(e.sample, level)
    assert found is not None
    shown, limit = [_number(x, e.unit) for x in found], _number(e.margin, e.unit)
    form = distinct_form(shown, (-limit, 0.0, limit), FORMS)
    low, high = map(form.format, shown)
    return found, f"the {percent(level)} interval, {low} to {high}{_suffix(e.unit)},"


FORMS = tuple(f"{{:+.{digits}g}}" for digits in range(3, 18))
"""Formats of an end of an interval, from few digits to all."""


def amount(value: float, unit: str) -> str:
    """A margin in words: `0.5 points`, `2 %`."""
    return f"{_number(value, unit):.6g}{_suffix(unit)}"


def _number(value: float, unit: str) -> float:
    return value * 100 if unit else value


def _suffix(unit: str) -> str:
    return f" {unit}" if unit else ""


def _p(value: float) -> str:
    return "p<0.001" if value < 0.001 else f"p={value:.3f}"
