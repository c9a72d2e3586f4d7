"""From runs to a table: variants, each compared with a baseline, with a verdict.

runs, skipped = find_runs([Path("outputs/2026-11-21")])
comparison = compare(runs, skipped, margin=0.005, relative_margin=0.02)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

from mprun.compare import measures, mixing
from mprun.compare.artefacts import artefacts
from mprun.compare.comparison import Comparison, Run, Skipped, Variant, Verdict
from mprun.compare.equal_quality import equal_quality, read_curve
from mprun.compare.formatting import readable, substitution_label
from mprun.compare.grouping import by_variant
from mprun.compare.load import latest
from mprun.compare.measures import RunGroup
from mprun.compare.notes import artefact_warnings, comparison_notes, variant_notes
from mprun.compare.statistics import ALPHA, estimate, interval
from mprun.compare.time_ratios import TWO_KINDS, TimedPairs, overlapping, timed_pairs
from mprun.compare.verdicts import Criterion, Evidence, error_text, evidence_on, failures, judge
from mprun.errors import UsageError
from mprun.records.mode_names import mode_hint, own_label

LONGEST_METRIC = 60
"""Characters of its name that are shown."""


def compare(
    runs: Sequence[Run],
    skipped: Sequence[Skipped] = (),
    *,
    margin: float,
    relative_margin: float,
    baseline: str | None = None,
    split: Literal["auto", "test", "validation", "train"] = "auto",
    mix: Collection[str] = (),
    beside: Sequence[Run] = (),
) -> Comparison:
    """RunGroup runs by variant and compare each variant with the baseline.

    Args:
        runs: completed and failed runs; of several of one variant and seed the latest counts.
        skipped: the folders left out so far; they are reported with the result.
        margin: differences of accuracies, and of other fractions of which more is better, inside
            plus and minus this do not matter.
        relative_margin: the same for losses and all else, as a share of the baseline's mean; also
            how near the baseline's best validation loss counts as reached.
        baseline: a variant's label or hash; None for the fp32 variant with the fewest changes.
        split: whose samples the metric is of; auto: test if every run has it, else validation,
            else train.
        mix: what runs may differ in besides the variant: recipes, data, hardware, code.
        beside: further runs, which are not compared but may have shared a machine with those.

    Raises:
        UsageError: no run is complete, runs differ in something that is not in `mix`, or there is
            no such baseline or split.
    """
    mixed = mixing.check_mixing(runs, mix)
    compared, repeated = latest(runs)
    left_out = (*skipped, *repeated)
    groups = by_variant(compared)
    _check_usable(groups, left_out)
    base = _baseline(groups, baseline)
    groups = [base, *(g for g in groups if g is not base)]
    used_split = _split(groups, split)
    metric = base.first.summary.metric
    known = (value for group in groups for value in measures.scores(group, used_split).values())
    is_relative = not measures.is_fraction(metric, known)
    resolution = measures.resolution(groups, metric.name, used_split)
    limit = relative_margin if is_relative else margin
    name, more = readable(metric.name, LONGEST_METRIC), metric.higher_is_better
    criterion = Criterion(used_split, name, limit, is_relative, resolution, more)
    evidence = [evidence_on(group, base, criterion) for group in groups[1:]]
    verdicts = judge(evidence, more)
    shared = overlapping([*runs, *beside])
    timed = _timed(base, base, shared)
    rows = [_variant(base, base, used_split, timed, None, Verdict("baseline", failures(base)))]
    curve_of = cache(read_curve)
    for group, own_evidence, verdict in zip(groups[1:], evidence, verdicts, strict=True):
        timed = _timed(group, base, shared)
        row = _variant(group, base, used_split, timed, own_evidence, verdict)
        timed = timed._replace(no_verdict=row.no_time_verdict)
        quality = equal_quality(group, base, relative_margin, timed, curve_of)
        rows.append(replace(row, equal_quality=quality))
    tested = sum(e.is_tested for e in evidence)
    return Comparison(
        recipe=mixing.recipe_text(compared),
        metric=name,
        split=used_split,
        higher_is_better=more,
        margin=limit,
        is_relative=is_relative,
        baseline=base.label,
        variants=tuple(rows),
        skipped=left_out,
        data=mixing.data_text(compared),
        hardware=mixing.hardware_text(compared),
        code=mixing.code_text(compared),
        warnings=tuple(artefact_warnings(rows)),
        notes=(
            *mixed,
            *comparison_notes(groups, used_split, baseline is None, tested),
            *variant_notes(rows),
        ),
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
            near = mode_hint(wanted, by_label)
            raise UsageError(
                f"compare.baseline={wanted}: there is no such variant; "
                f"legal: {', '.join(map(repr, by_label))}{near}"
            )
        return by_label[own]
    complete = [group for group in groups if group.completed]
    plain = [group for group in complete if group.first.summary.precision == "fp32"]
    return min(plain or complete[:1], key=_changes)


def _changes(group: RunGroup) -> int:
    """How many options of a variant's mode were changed, as far as its runs record it."""
    summary = group.first.summary
    label, row = summary.variant, summary.effective
    return label.count("+") + label.count(" x") + len(row.layers) + (not group.is_native)


def _split(groups: Sequence[RunGroup], wanted: str) -> str:
    runs = [summary for group in groups for summary in group.by_seed.values()]
    has = {name: sum(measures.score(s, name) is not None for s in runs) for name in measures.SPLITS}
    if wanted == "auto":
        return next((name for name in measures.SPLITS if has[name] == len(runs)), "train")
    if not has[wanted]:
        legal = ", ".join(name for name in measures.SPLITS if has[name])
        raise UsageError(f"compare.split={wanted}: no run has such samples; legal: {legal}")
    return wanted


def _timed(group: RunGroup, base: RunGroup, shared: set[int]) -> TimedPairs:
    """The pairs whose times are compared."""
    pairs = measures.comparable_pairs(group, base)
    timed = timed_pairs(pairs, shared)
    if not pairs and measures.native_pairs(group, base):
        return timed._replace(no_verdict=TWO_KINDS)
    return timed


def _variant(
    group: RunGroup,
    base: RunGroup,
    split: str,
    timed: TimedPairs,
    evidence: Evidence | None,
    verdict: Verdict,
) -> Variant:
    summary = group.first.summary
    values = list(measures.scores(group, split).values())
    whole = all(map(math.isfinite, values))
    sample = evidence.sample if evidence is not None and evidence.unit and whole else None
    pairs = timed.pairs
    unsettling = artefacts(group.label, base.label, pairs)
    reason = timed.no_verdict or (unsettling[0].text if unsettling else "")
    return Variant(
        label=group.label,
        variant_hash=summary.variant_hash,
        precision=summary.precision,
        execution=summary.execution,
        runs=group.completed,
        failed=group.failed,
        step_time_ms=measures.step_percentiles(group),
        step_time_ratio=measures.ratio(pairs, lambda s: s.step_time_ms.median, bool(reason)),
        samples_per_second=measures.samples_per_second(group),
        throughput_ratio=measures.ratio(pairs, lambda s: s.samples_per_second, bool(reason)),
        no_time_verdict=reason,
        memory_bytes=measures.memory(group),
        memory_ratio=measures.memory_ratio(group, base),
        metric=measures.mean_score(values),
        difference=estimate(sample) if sample is not None else None,
        equivalence=interval(sample, 1 - 2 * ALPHA) if sample is not None else None,
        verdict=verdict,
        substituted=substitution_label(run.summary for run in group.completed),
        artefacts=unsettling,
        untimed=timed.left_out,
    )
