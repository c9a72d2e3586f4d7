"""From runs to a table with verdicts: `compare`, and what decides.

    runs, skipped = find_runs([Path("outputs/2026-11-21")])
    comparison = compare(runs, skipped, margin=0.005, relative_margin=0.02)

Runs become variants (`load.by_variant`), each compared with the baseline seed by seed. A variant is
`equivalent` if its difference is shown to lie inside the margin, else `worse` or `better` if it is
shown to differ from 0, else `inconclusive`. The tests of equivalence over all variants are one
family, those of a difference another; p-values are adjusted within each by Holm's method. Each
verdict has the interval that decided, at the level of Holm's step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from mprun.errors import UsageError
from mprun.records.console.formatting import (
    counted,
    distinct_form,
    level_text,
    readable,
    substitution_label,
)
from mprun.records.mode_names import mode_hint, own_label
from mprun.records.run_record import Memory, Metric, Summary
from mprun.study.compare import judged_quantities as quantities
from mprun.study.compare.comparison import (
    Comparison,
    Estimate,
    Interval,
    LookVerdict,
    Outcome,
    QuantityVerdict,
    Run,
    Skipped,
    StepPercentiles,
    Variant,
    Verdict,
)
from mprun.study.compare.equal_quality import Curve, equal_quality, read_curve
from mprun.study.compare.load import SPLITS, RunGroup, by_variant, latest, score, scores
from mprun.study.compare.looks import HOPELESS, Look, PlannedLooks, chance_to_settle
from mprun.study.compare.notes import (
    artefact_warnings,
    check_mixing,
    common_texts,
    comparison_notes,
    variant_notes,
)
from mprun.study.compare.statistics import (
    ALPHA,
    Sample,
    difference_p,
    equivalence_p,
    estimate,
    geometric_mean,
    holm,
    holm_levels,
    interval,
    seeds_to_settle,
    summarise,
)
from mprun.study.compare.times import Pair, artefacts, overlapping, timed_pairs

MAX_METRIC = 60  # Characters of the metric's name that are shown: a record may have any


def compare(
    runs: Sequence[Run],
    skipped: Sequence[Skipped] = (),
    *,
    margin: float,
    relative_margin: float,
    baseline: str | None = None,
    split: str = "auto",
    weights: str = "auto",
    mix: Collection[str] = (),
    beside: Sequence[Run] = (),
    alpha: float = ALPHA,
    looks: PlannedLooks | None = None,
    margins: Mapping[str, float] | None = None,
) -> Comparison:
    """Group runs by variant and compare each variant with the baseline.

    Args:
        runs: completed and failed runs; of several of one variant and seed the latest counts.
        skipped: the folders left out so far; they are reported with the result.
        margin: differences of accuracies, and of other fractions of which more is better, inside
            plus and minus this do not matter.
        relative_margin: the same for losses and all else, as a share of the baseline's mean; also
            how near the baseline's best validation loss counts as reached.
        baseline: a variant's label or hash; None for the fp64 or else fp32 variant with the fewest
            changes.
        split: whose samples the metric is of; auto: test if every run has it, else validation,
            else train.
        weights: which of a run: last, averaged, or auto: averaged if every run has them.
        mix: what runs may differ in besides the variant: recipes, data, hardware, code.
        beside: further runs, which are not compared but may have shared a machine with those.
        alpha: the level of the verdicts, as in `judge`; looks have their own.
        looks: those of the study, whose first runs are the baseline's; None judges once, by all
            pairs.
        margins: of quantities, by name, in place of `relative_margin`.

    Raises:
        UsageError: no run is complete, runs differ in something that is not in `mix`, or there is
            no such baseline, split, weights or quantity.
    """
    mixed = check_mixing(runs, mix)  # before repeated runs go: a mix must not hide among these
    compared, repeated = latest(runs)
    left_out = (*skipped, *repeated)
    groups = by_variant(compared)
    _check_usable(groups, left_out)
    base = _baseline(groups, baseline)
    groups = [base, *(g for g in groups if g is not base)]  # the baseline is the first row
    used_split = _split(groups, split)
    places = _places(groups, used_split, weights)
    averaged = places is not None
    criterion = _criterion(groups, used_split, averaged, margin, relative_margin)
    judged = _judged(groups[1:], base, criterion, alpha, looks)
    # All runs, also repeated ones: these too may have slowed others on the machine
    timing = _Timing(overlapping([*runs, *beside]), relative_margin, cache(read_curve))
    rows = [_variant(base, base, criterion, timing, Verdict("baseline", failures(base)))]
    for group, own in zip(groups[1:], judged, strict=True):
        row = _variant(group, base, criterion, timing, own.verdict, own.evidence)
        rows.append(replace(row, looks=tuple(own.looks)))
    tested = sum(own.evidence.is_tested for own in judged)
    texts = common_texts(compared)
    return Comparison(
        recipe=texts["recipe"],
        metric=criterion.metric,
        split=used_split,
        higher_is_better=criterion.higher_is_better,
        margin=criterion.margin,
        is_relative=criterion.is_relative,
        baseline=base.label,
        variants=tuple(rows),
        skipped=left_out,
        data=texts["data"],
        hardware=texts["hardware"],
        code=texts["code"],
        warnings=tuple(artefact_warnings(rows)),
        notes=(
            *mixed,
            *comparison_notes(groups, used_split, baseline is None, tested, averaged, looks),
            *variant_notes(rows),
        ),
        quantities=tuple(_quantities(groups, relative_margin, margins or {}, alpha, looks)),
        planned_pairs=() if looks is None else tuple(look.pairs for look in looks.looks),
        weights="averaged" if averaged else "last",
        places=places,
    )


def _check_usable(groups: Sequence[RunGroup], skipped: Sequence[Skipped]) -> None:
    if any(group.completed for group in groups):
        return
    failed = [run for group in groups for run in group.failed]
    reasons = [f"{run.path} failed: {error_text(run)}" for run in failed]
    reasons += [f"{s.path}: {s.reason}" for s in skipped]
    listed = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if reasons[3:] else "")
    raise UsageError(f"there is no completed run to compare: {listed or 'no run was named'}")


def _baseline(groups: Sequence[RunGroup], wanted: str | None) -> RunGroup:
    by_label = {group.label: group for group in groups}
    if wanted is not None:
        by_hash = {group.first.summary.variant_hash: group for group in groups}
        if wanted in by_hash:
            return by_hash[wanted]
        own = wanted if wanted in by_label else own_label(wanted)
        if own not in by_label:
            near = mode_hint(wanted, by_label)  # another program's name of a mode, or a misspelling
            raise UsageError(
                f"compare.baseline={wanted}: there is no such variant; "
                f"legal: {', '.join(map(repr, by_label))}{near}"
            )
        return by_label[own]
    complete = [group for group in groups if group.completed]  # a failed run has no figures
    by_mode = [[g for g in complete if g.first.summary.precision == x] for x in ("fp64", "fp32")]
    # Without fp64 and fp32 there is no natural baseline: the variant that was named first.
    return min(by_mode[0] or by_mode[1] or complete[:1], key=_changes)


def _changes(group: RunGroup) -> int:
    """How many options of a variant's mode were changed, as far as its runs record it."""
    summary = group.first.summary
    label, row = summary.variant, summary.effective
    # A label names op lists after "+", and a factor of the batch after " x"
    return label.count("+") + label.count(" x") + len(row.layers) + (not group.is_native)


def _split(groups: Sequence[RunGroup], wanted: str) -> str:
    runs = [summary for group in groups for summary in group.by_seed.values()]
    has = {name: sum(score(s, name) is not None for s in runs) for name in SPLITS}
    if wanted == "auto":
        # Seeds without a metric of the split would drop out, so every run must have it.
        return next((name for name in SPLITS if has[name] == len(runs)), "train")
    if not has[wanted]:
        legal = ", ".join(name for name in SPLITS if has[name])
        raise UsageError(f"compare.split={wanted}: no run has such samples; legal: {legal}")
    return wanted


def _places(groups: Sequence[RunGroup], split: str, wanted: str) -> int | None:
    """The fewest places whose weights the runs averaged; None where the last weights are judged."""
    if wanted == "last":
        return None
    runs = [summary for group in groups for summary in group.by_seed.values()]
    have = [s.averaged.places for s in runs if s.averaged and score(s, split, True) is not None]
    if len(have) == len(runs):
        return min(have)
    if wanted == "averaged":
        raise UsageError(
            f"compare.weights=averaged: {len(runs) - len(have)} of {counted(len(runs))} have no "
            f"{split} metric of averaged weights; legal: auto, last; train.average_weights=5 makes "
            "a run score them"
        )
    return None


# ---- the criterion -------------------------------------------------------------------------------


class Criterion(NamedTuple):
    """How variants are judged in one comparison."""

    split: str
    averaged: bool  # Whether averaged weights are judged
    metric: str
    margin: float
    is_relative: bool  # Whether differences are shares of the baseline's mean
    resolution: float  # The smallest step of the metric
    higher_is_better: bool


def _criterion(
    groups: Sequence[RunGroup], split: str, averaged: bool, margin: float, relative_margin: float
) -> Criterion:
    metric = groups[0].first.summary.metric
    known = [value for group in groups for value in scores(group, split, averaged).values()]
    is_relative = not is_fraction(metric, known)
    resolution = 0.0
    if metric.name == "accuracy":  # it changes by whole samples
        rows = (s.data for g in groups for s in g.by_seed.values())
        fewest = min(getattr(row, f"{split}_samples") for row in rows)
        resolution = 1 / fewest if fewest > 0 else 0.0
    return Criterion(
        split,
        averaged,
        readable(metric.name, MAX_METRIC),
        relative_margin if is_relative else margin,
        is_relative,
        resolution,
        metric.higher_is_better,
    )


def is_fraction(metric: Metric, values: Iterable[float]) -> bool:
    """Whether differences are points: an accuracy, or one from 0 to 1, more is better."""
    if metric.name == "accuracy":
        return True
    finite = [value for value in values if math.isfinite(value)]
    # An error rate is in 0 to 1 too, but a point of it near 0 is a large change: it is a share
    return metric.higher_is_better and bool(finite) and all(0 <= x <= 1 for x in finite)


# ---- verdicts ------------------------------------------------------------------------------------

# Every float32 loss but 0 is larger (the least is 1.4e-45); a share of 0 is undefined
MIN_LOSS = 1e-45


@dataclass(frozen=True)
class Evidence:
    """The basis of the verdict on a variant."""

    sample: Sample | None
    """Paired differences, the variant minus the baseline; None without a common seed."""
    margin: float  # Differences inside plus and minus this do not matter; in their unit
    unit: str  # points, % or nothing: differences of accuracies, shares, plain differences
    failure: str = ""
    """Why the variant is worse whatever the differences: runs that failed or diverged."""

    @property
    def is_tested(self) -> bool:
        """Whether a spread is known."""
        return not self.failure and self.sample is not None and self.sample.n > 1


def evidence_on(group: RunGroup, base: RunGroup, criterion: Criterion) -> Evidence:
    """The evidence on a variant: its paired differences, and failures that outweigh them."""
    ours, theirs = (scores(x, criterion.split, criterion.averaged) for x in (group, base))
    # A seed with which the baseline failed too says nothing against the variant
    excused = [run.summary.seed for run in base.failed]
    reasons = (failures(group, excused), _divergence(group, ours, theirs, criterion.metric))
    return paired_evidence(ours, theirs, criterion, "; ".join(filter(None, reasons)))


def paired_evidence(
    ours: Mapping[int, float], theirs: Mapping[int, float], criterion: Criterion, failure: str = ""
) -> Evidence:
    """The differences of the pairs in which both metrics are finite, by seed."""
    margin = criterion.margin
    seeds = [s for s in sorted(ours.keys() & theirs.keys()) if math.isfinite(ours[s] + theirs[s])]
    if not seeds:
        return Evidence(None, margin, "", failure)
    differences = [ours[s] - theirs[s] for s in seeds]
    if not criterion.is_relative:
        return Evidence(summarise(differences, criterion.resolution), margin, "points", failure)
    # One divisor for all pairs: a ratio per pair would weigh seeds with a small loss more
    mean = abs(fmean(theirs[s] for s in seeds))
    if mean >= MIN_LOSS:
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


@dataclass
class Judged:
    """The judgement on a variant."""

    evidence: Evidence
    verdict: Verdict
    looks: list[LookVerdict] = field(default_factory=list)


def _judged(
    groups: Sequence[RunGroup],
    base: RunGroup,
    criterion: Criterion,
    alpha: float,
    plan: PlannedLooks | None,
) -> list[Judged]:
    """The variants but the baseline, judged once, or at each look of a plan."""
    evidence = [evidence_on(group, base, criterion) for group in groups]
    if plan is None:
        verdicts = judge(evidence, criterion.higher_is_better, alpha)
        return list(map(Judged, evidence, verdicts))
    first = plan.looks[0].pairs
    waiting = f"the first look is after {first} seeds, and fewer have ended"
    judged = [Judged(e, Verdict("inconclusive", waiting)) for e in evidence]
    for look in plan.looks:
        seeds = set(plan.seeds[: look.pairs])
        if not seeds <= base.seeds:
            break
        if not base.of(seeds).completed:
            failed = Verdict("inconclusive", f"{base.label} failed in every run", closed="hopeless")
            return [Judged(e, failed) for e in evidence]
        now = [
            i
            for i, (x, group) in enumerate(zip(judged, groups, strict=True))
            if not x.verdict.closed and seeds <= group.seeds
        ]
        for i in now:
            judged[i].evidence = evidence_on(groups[i].of(seeds), base.of(seeds), criterion)
        others = [x for i, x in enumerate(judged) if i not in now]
        _look([judged[i] for i in now], others, look, plan.looks[-1], criterion.higher_is_better)
    return judged


def _look(
    now: Sequence[Judged],
    others: Sequence[Judged],
    look: Look,
    last: Look,
    higher_is_better: bool,
) -> None:
    """Judge the open variants in the families of all."""
    # A rejected hypothesis leaves its family, all others stay in it: Holm's method over the looks
    words = [x.verdict.word for x in others if x.evidence.is_tested]
    left = (
        sum(word != "equivalent" for word in words),
        sum(word not in ("better", "worse") for word in words),
    )
    verdicts = judge([x.evidence for x in now], higher_is_better, look.level, left)
    for x, verdict in zip(now, verdicts, strict=True):
        x.verdict = _at_look(x.evidence, verdict, look, last)
        mean = None if x.evidence.sample is None else x.evidence.sample.mean
        row = LookVerdict(look.pairs, mean, verdict.interval, verdict.level, verdict.word)
        x.looks.append(row)


def _at_look(e: Evidence, verdict: Verdict, look: Look, last: Look) -> Verdict:
    """The verdict with what it means for further runs."""
    is_open = verdict.word == "inconclusive"
    if not (e.is_tested and e.sample):  # it failed, or its pairs are too few
        return replace(verdict, closed="" if is_open and look != last else "settled")
    reason = f"{verdict.reason}; look after {look.pairs} seeds, level {100 * look.level:.2g} %"
    if not is_open:
        return replace(verdict, reason=reason, closed="settled")
    chance = 0.0 if look == last else chance_to_settle(e.sample, e.margin, last)
    if chance >= HOPELESS:
        return replace(verdict, reason=reason)
    why = f"{100 * chance:.2g} % chance to be settled by {last.pairs} seeds"
    return replace(verdict, reason=f"{reason}; {why}", closed="hopeless")


def judge(
    evidence: Sequence[Evidence],
    higher_is_better: bool,
    alpha: float = ALPHA,
    left: tuple[int, int] = (0, 0),
) -> list[Verdict]:
    """A verdict on each variant except the baseline; their tests are adjusted together.

    Two families, each adjusted by itself: at most `alpha` of false claims of either kind. `left`:
    how many hypotheses more they have, of equivalence and of a difference, which are not rejected.
    """
    samples = [(e.sample, e.margin) for e in evidence if e.is_tested and e.sample is not None]
    equal = _tests([equivalence_p(sample, margin) for sample, margin in samples], alpha, left[0])
    apart = _tests([difference_p(sample) for sample, _ in samples], alpha, left[1])
    tests = iter(zip(equal, apart, strict=True))
    return [
        _judge(e, *next(tests), higher_is_better) if e.is_tested else _untested(e) for e in evidence
    ]


def _quantities(
    groups: Sequence[RunGroup],
    relative_margin: float,
    margins: Mapping[str, float],
    alpha: float,
    plan: PlannedLooks | None,
) -> Iterator[QuantityVerdict]:
    """A row for each quantity and variant; all tests are one family."""
    base, *others = groups
    names = [*dict.fromkeys(n for g in groups for s in g.by_seed.values() for n in s.quantities)]
    if unknown := [name for name in margins if name not in names]:
        legal = f"legal: {', '.join(names)}" if names else "the runs have no quantities"
        raise UsageError(f"compare.margin.{unknown[0]}: there is no such quantity; {legal}")
    if plan is not None:
        # the level of the look that was reached: all looks together have `alpha`, wherever it ends
        reached = [look.level for look in plan.looks if look.pairs >= len(base.seeds)]
        alpha = (reached or [plan.looks[-1].level])[0]
    found = [
        (name, x, _of_quantity(name, x, base, margins.get(name, relative_margin)))
        for name in names
        for x in others
    ]
    verdicts = iter(judge([e for *_, e in found], False, alpha))
    by_name = {name: [(x, e, next(verdicts)) for n, x, e in found if n == name] for name in names}
    for name, rows in by_name.items():
        left_open = quantities.spread([*quantities.rows_of(base, name).values()])
        yield quantities.unjudged(base, name, left_open)
        for group, e, verdict in rows:
            row = quantities.unjudged(group, name, left_open)
            word: str = verdict.word
            if not row.is_error and word in ("better", "worse") and not e.failure:
                word = "differs"
            mean = estimate(e.sample) if e.sample is not None else None
            yield replace(row, margin=e.margin, difference=mean, word=word, reason=verdict.reason)


def _of_quantity(name: str, group: RunGroup, base: RunGroup, margin: float) -> Evidence:
    """The paired differences of a quantity, as shares of the baseline's figure."""
    criterion = Criterion("", False, name, margin, True, 0.0, False)
    ours, theirs = (quantities.judged_figures(x, name) for x in (group, base))
    return paired_evidence(ours, theirs, criterion, _divergence(group, ours, theirs, name))


class _HypothesisTest(NamedTuple):
    """One hypothesis of a family."""

    p: float  # The p-value, adjusted
    level: float  # The limit of the p-value before its adjustment
    rejects: bool
    family: int  # The number of its hypotheses

    @property
    def text(self) -> str:
        """`p=0.012 after Holm over 3 variants`."""
        p = "p<0.001" if self.p < 0.001 else f"p={self.p:.3f}"
        return f"{p} after Holm over {self.family} variants" if self.family > 1 else p


def _tests(p_values: Sequence[float], alpha: float, left: int) -> list[_HypothesisTest]:
    """The tests of these p-values, in a family of `left` hypotheses more."""
    family = [*p_values, *[1.0] * left]
    adjusted = holm(family)[: len(p_values)]
    rows = zip(adjusted, holm_levels(family, alpha), strict=False)
    return [_HypothesisTest(p, level, p <= alpha, len(family)) for p, level in rows]


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
    higher_is_better: bool,
) -> Verdict:
    """The verdict with the interval that shows it, at the level of Holm's step.

    If neither test rejects, the wider interval shows both: it reaches beyond the margin and
    includes 0.
    """
    assert e.sample is not None
    # Two one-sided tests at a level are one interval at twice that level: 90 % for 5 %
    inside, off = 1 - 2 * equal.level, 1 - apart.level
    margin = f"{_number(e.margin, e.unit):.6g} {e.unit}".rstrip()
    if equal.rejects:  # first: a difference that is real but inside the margin does not matter
        decisive, shown = _interval(e, inside)
        text = f"{shown} lies inside the margin of {margin} ({equal.text})"
        return Verdict("equivalent", text, None, decisive, inside)
    if apart.rejects:
        word: Outcome = "better" if (e.sample.mean > 0) == higher_is_better else "worse"
        decisive, shown = _interval(e, off)
        text = f"{shown} excludes 0 ({apart.text})"
        return Verdict(word, text, None, decisive, off)
    level = max(inside, off)
    decisive, shown = _interval(e, level)
    text = (
        f"neither inside the margin of {margin} ({equal.text}) nor different from 0 "
        f"({apart.text}); {shown} reaches beyond the margin and includes 0"
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
    unit = f" {e.unit}" if e.unit else ""
    return ends, f"the {level_text(level)} interval, {low} to {high}{unit},"


# Formats of an end of an interval, from 3 digits to 17, which tell all float64 apart
FORMS = tuple(f"{{:+.{digits}g}}" for digits in range(3, 18))


def _number(value: float, unit: str) -> float:
    return value * 100 if unit else value  # points and % are hundredths; plain differences are not


# ---- rows ----------------------------------------------------------------------------------------


class _Timing(NamedTuple):
    """What the times of all variants are judged by."""

    shared: set[int]  # `overlapping` of all runs
    tolerance: float  # How near the baseline's best validation loss counts as reached
    curve_of: Callable[[Path], Curve]
    """`read_curve`, which caches the baseline's curves for the next variant."""


def _variant(
    group: RunGroup,
    base: RunGroup,
    criterion: Criterion,
    timing: _Timing,
    verdict: Verdict,
    evidence: Evidence | None = None,
) -> Variant:
    """A row; the baseline's has no evidence."""
    summary = group.first.summary
    values = list(scores(group, criterion.split, criterion.averaged).values())
    whole = all(map(math.isfinite, values))  # else the mean difference is of the good seeds only
    sample = evidence.sample if evidence is not None and evidence.unit and whole else None
    timed = timed_pairs(group, base, timing.shared)
    disturbed = artefacts(group.label, base.label, timed.pairs)
    reason = timed.no_verdict or (disturbed[0].text if disturbed else "")
    timed = timed._replace(no_verdict=reason)
    ours, theirs = _memory(group), _memory(base)
    rates = [x for s in group.by_seed.values() if (x := s.samples_per_second) is not None]
    # An emulation computes in float32 and rounds: its memory is not that of the mode
    has_ratio = group is not base and group.is_native and base.is_native
    return Variant(
        label=group.label,
        variant_hash=summary.variant_hash,
        precision=summary.precision,
        execution=summary.execution,
        runs=group.completed,
        failed=group.failed,
        step_time_ms=_step_percentiles(group),
        step_time_ratio=_ratio(timed.pairs, lambda s: s.step_time_ms.median, bool(reason)),
        samples_per_second=median(rates) if rates else None,
        throughput_ratio=_ratio(timed.pairs, lambda s: s.samples_per_second, bool(reason)),
        no_time_verdict=reason,
        memory_bytes=ours,
        memory_ratio=_quotient(ours["peak"], theirs["peak"]) if has_ratio else None,
        metric=_mean_score(values),
        difference=estimate(sample) if sample is not None else None,
        equivalence=interval(sample, 1 - 2 * ALPHA) if sample is not None else None,
        verdict=verdict,
        substituted=substitution_label(run.summary for run in group.completed),
        artefacts=disturbed,
        untimed=timed.left_out,
        equal_quality=None
        if group is base
        else equal_quality(group, base, timing.tolerance, timed, timing.curve_of),
    )


def _mean_score(values: Sequence[float]) -> Estimate | None:
    """The mean over seeds; NaN or infinite, and without an interval, if one of them is."""
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Estimate(sum(values) / len(values), None, len(values))
    return estimate(summarise(values))


def _step_percentiles(group: RunGroup) -> StepPercentiles | None:
    """Percentiles of the milliseconds of a step; None if no run timed any."""
    rows = [s.step_time_ms for s in group.by_seed.values()]
    timed = [
        (row.median, row.p10, row.p90)
        for row in rows
        if row.median is not None and row.p10 is not None and row.p90 is not None
    ]
    if not timed:
        return None
    return StepPercentiles(*(median(column) for column in zip(*timed, strict=True)))


def _ratio(
    pairs: Sequence[Pair], figure: Callable[[Summary], float | None], no_interval: bool
) -> Estimate | None:
    """A figure over the baseline's; None if no pair has it."""
    quotients = (_quotient(figure(own), figure(other)) for own, other in pairs)
    ratios = [x for x in quotients if x is not None]
    if not ratios:
        return None
    mean = geometric_mean(ratios)
    return mean._replace(interval=None) if no_interval else mean


def _quotient(value: float | None, base: float | None) -> float | None:
    """None unless both are positive, and so is the quotient as a float."""
    if not value or not base or value < 0 or base < 0:
        return None
    return value / base if 0 < value / base < math.inf else None


def _memory(group: RunGroup) -> dict[str, int | None]:
    """Bytes by category; the largest over runs."""
    rows = [summary.memory_bytes for summary in group.by_seed.values()]
    return {
        part.name: max(
            (n for row in rows if (n := getattr(row, part.name)) is not None), default=None
        )
        for part in fields(Memory)
    }
