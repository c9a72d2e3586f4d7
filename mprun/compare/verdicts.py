"""From paired metrics to verdicts: the evidence on each variant, and the judgement on all of them.

A variant is `equivalent` if its difference is shown to lie inside the margin, else `worse` or
`better` if it is shown to differ from 0, else `inconclusive`. The tests of equivalence over all
variants are one family, those of a difference another; p-values are adjusted within each by Holm's
method. Each verdict has the interval that decided, at the level of Holm's step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from mprun.compare import measures
from mprun.compare.comparison import Interval, Outcome, Run, Verdict
from mprun.compare.formatting import counted, distinct_form, level_text, readable
from mprun.compare.measures import RunGroup
from mprun.compare.statistics import (
    ALPHA,
    Sample,
    difference_p,
    equivalence_p,
    holm,
    holm_levels,
    interval,
    seeds_to_settle,
    summarise,
)

LEAST_LOSS = 1e-45
"""Every float32 loss but 0 is larger: differences cannot be shares of a smaller mean."""


class Criterion(NamedTuple):
    """How variants are judged in one comparison."""

    split: str
    metric: str
    margin: float
    is_relative: bool
    """Whether differences are shares of the baseline's mean."""
    resolution: float
    """The smallest step of the metric."""
    higher_is_better: bool


@dataclass(frozen=True)
class Evidence:
    """The basis of the verdict on a variant."""

    sample: Sample | None
    """Paired differences, the variant minus the baseline; None without a common seed."""
    margin: float
    """Differences inside plus and minus this do not matter; in their unit."""
    unit: str
    """points, % or nothing: differences of accuracies, shares, plain differences."""
    failure: str = ""
    """Why the variant is worse whatever the differences: runs that failed or diverged."""

    @property
    def is_tested(self) -> bool:
        """Whether a spread is known."""
        return not self.failure and self.sample is not None and self.sample.n > 1


def evidence_on(group: RunGroup, base: RunGroup, criterion: Criterion) -> Evidence:
    """The evidence on a variant: its paired differences, and failures that outweigh them."""
    ours, theirs = (measures.scores(g, criterion.split) for g in (group, base))
    excused = [run.summary.seed for run in base.failed]
    reasons = (failures(group, excused), _divergence(group, ours, theirs, criterion.metric))
    return paired_evidence(ours, theirs, criterion, "; ".join(filter(None, reasons)))


def paired_evidence(
    ours: Mapping[int, float], theirs: Mapping[int, float], criterion: Criterion, failure: str = ""
) -> Evidence:
    """The differences of the pairs in which both metrics are finite.

    Args:
        ours: seed to the variant's metric.
        theirs: seed to the baseline's.
        criterion: how the variant is judged.
        failure: why the variant is worse whatever the differences; empty if it is not.
    """
    margin = criterion.margin
    seeds = [s for s in sorted(ours.keys() & theirs.keys()) if math.isfinite(ours[s] + theirs[s])]
    if not seeds:
        return Evidence(None, margin, "", failure)
    differences = [ours[s] - theirs[s] for s in seeds]
    if not criterion.is_relative:
        return Evidence(summarise(differences, criterion.resolution), margin, "points", failure)
    mean = abs(fmean(theirs[s] for s in seeds))
    if mean >= LEAST_LOSS:
        differences = [d / mean for d in differences]
    elif any(differences):  # a share of zero is undefined: only whether they differ is tested
        return Evidence(summarise(differences), 0.0, "", failure)
    return Evidence(summarise(differences), margin, "%", failure)


def failures(group: RunGroup, excused: Collection[int] = ()) -> str:
    """`2 of 5 runs failed: <why the first did>`, without the excused seeds; empty if none did."""
    failed = [run for run in group.failed if run.summary.seed not in excused]
    return f"{len(failed)} of {_runs(group)} failed: {error_text(failed[0])}" if failed else ""


def error_text(run: Run) -> str:
    """Why a run failed."""
    if run.summary.status == "completed":
        return "it has no metric: no step was taken"
    return readable(run.summary.error or "no reason given")


def _divergence(
    group: RunGroup, ours: Mapping[int, float], theirs: Mapping[int, float], metric: str
) -> str:
    """`1 of 5 runs ended with loss nan`; empty if the baseline did too with these seeds."""
    values = [
        value
        for seed, value in ours.items()
        if not math.isfinite(value) and math.isfinite(theirs.get(seed, 0.0))
    ]
    return f"{len(values)} of {_runs(group)} ended with {metric} {values[0]}" if values else ""


def _runs(group: RunGroup) -> str:
    return counted(len(group.completed) + len(group.failed))


def judge(evidence: Sequence[Evidence], higher_is_better: bool) -> list[Verdict]:
    """A verdict on each variant except the baseline; their tests are adjusted together."""
    samples = [(e.sample, e.margin) for e in evidence if e.is_tested and e.sample is not None]
    equal = _tests([equivalence_p(sample, margin) for sample, margin in samples])
    apart = _tests([difference_p(sample) for sample, _ in samples])
    tests = iter(zip(equal, apart, strict=True))
    return [
        _judge(e, *next(tests), len(samples), higher_is_better) if e.is_tested else _untested(e)
        for e in evidence
    ]


class _HypothesisTest(NamedTuple):
    """One hypothesis of a family."""

    p: float
    """The p-value, adjusted."""
    level: float
    """The limit of the p-value before its adjustment."""

    @property
    def rejects(self) -> bool:
        return self.p <= ALPHA


def _tests(p_values: Sequence[float]) -> list[_HypothesisTest]:
    return list(map(_HypothesisTest, holm(p_values), holm_levels(p_values)))


def _untested(e: Evidence) -> Verdict:
    if e.failure:
        return Verdict("worse", e.failure)
    if e.sample is None:
        return Verdict("inconclusive", "no seed with which both have the metric")
    return Verdict("inconclusive", "one seed in common with the baseline: a spread needs two")


def _judge(
    e: Evidence,
    equal: _HypothesisTest,
    apart: _HypothesisTest,
    variants: int,
    higher_is_better: bool,
) -> Verdict:
    """The verdict with the interval that shows it, at the level of Holm's step.

    If neither test rejects, the wider interval shows both: it reaches beyond the margin and
    includes 0.
    """
    assert e.sample is not None
    inside, off = 1 - 2 * equal.level, 1 - apart.level
    adjusted = f" after Holm over {variants} variants" if variants > 1 else ""
    margin = amount(e.margin, e.unit)
    if equal.rejects:
        decisive, shown = _interval(e, inside)
        text = f"{shown} lies inside the margin of {margin} ({_p(equal.p)}{adjusted})"
        return Verdict("equivalent", text, None, decisive, inside)
    if apart.rejects:
        word: Outcome = "better" if (e.sample.mean > 0) == higher_is_better else "worse"
        decisive, shown = _interval(e, off)
        text = f"{shown} excludes 0 ({_p(apart.p)}{adjusted})"
        return Verdict(word, text, None, decisive, off)
    level = max(inside, off)
    decisive, shown = _interval(e, level)
    text = (
        f"neither inside the margin of {margin} ({_p(equal.p)}) nor different from 0 "
        f"({_p(apart.p)}){adjusted}; {shown} reaches beyond the margin and includes 0"
    )
    more = seeds_to_settle(e.sample, e.margin, equal.level, apart.level)
    return Verdict("inconclusive", text, more, decisive, level)


def _interval(e: Evidence, level: float) -> tuple[Interval, str]:
    """The interval of a level, also as text: `the 90 % interval, -0.2 to +0.3 points,`."""
    assert e.sample is not None
    ends = interval(e.sample, level)
    assert ends is not None
    shown, limit = [_number(x, e.unit) for x in ends], _number(e.margin, e.unit)
    form = distinct_form(shown, (-limit, 0.0, limit), FORMS)
    low, high = map(form.format, shown)
    return ends, f"the {level_text(level)} interval, {low} to {high}{_suffix(e.unit)},"


FORMS = tuple(f"{{:+.{digits}g}}" for digits in range(3, 18))
"""Formats of an end of an interval, from few digits to all."""


def amount(value: float, unit: str) -> str:
    """A margin as text: `0.5 points`, `2 %`."""
    return f"{_number(value, unit):.6g}{_suffix(unit)}"


def _number(value: float, unit: str) -> float:
    return value * 100 if unit else value


def _suffix(unit: str) -> str:
    return f" {unit}" if unit else ""


def _p(value: float) -> str:
    return "p<0.001" if value < 0.001 else f"p={value:.3f}"
