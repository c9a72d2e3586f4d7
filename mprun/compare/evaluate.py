"""From runs to a table: variants, each against a baseline, with a verdict.

found = find_runs([Path("outputs/2026-11-21")])
comparison = compare(*found, margin=0.005, relative_margin=0.02)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

from mprun.compare import interleaving as clock
from mprun.compare import measures, mixing, substitutions
from mprun.compare.load import latest, readable
from mprun.compare.measures import Group
from mprun.compare.notes import notes, notes_of
from mprun.compare.pairs import Setting, error_text, failures, pair
from mprun.compare.rows import Comparison, Run, Skipped, Variant, Verdict
from mprun.compare.statistics import ALPHA, estimate, interval
from mprun.compare.variant_labels import distinguish
from mprun.compare.verdicts import Evidence, judge
from mprun.errors import UsageError, hint


def compare(
    runs: Sequence[Run],
    skipped: Sequence[Skipped] = (),
    *,
    margin: float,
    relative_margin: float,
    baseline: str | None = None,
    split: Literal["auto", "test", "validation", "train"] = "auto",
    mix: Collection[str] = (),
) -> Comparison:
    """Group runs by variant and set each variant against the baseline.

    Args:
        runs: completed and failed runs; of several of one variant and seed the latest counts.
        skipped: what was passed over on the way here, to be told with the result.
        margin: differences of accuracies inside plus and minus this do not matter.
        relative_margin: the same for losses, as a share of the baseline's mean.
        baseline: a variant's label or hash; None for the fp32 variant with the fewest changes.
        split: whose samples the metric is of; auto: test where every run has it, else validation,
            else train.
        mix: what runs may differ in besides the variant: recipes, data, hardware, code.

    Raises:
        UsageError: no run is complete, runs differ in something that is not in `mix`, or there is
            no such baseline or split.
    """
    mixed = mixing.check_mixing(runs, mix)
    kept, repeated = latest(runs)
    told = (*skipped, *repeated)
    groups = _groups(kept)
    _check_usable(groups, told)
    base = _baseline(groups, baseline)
    groups = [base, *(g for g in groups if g is not base)]
    chosen = _split(groups, split)
    metric = base.first.summary.metric
    is_relative = metric.name == "loss"
    wanted = relative_margin if is_relative else margin
    known_to = measures.resolution(groups, metric.name, chosen)
    setting = Setting(chosen, metric.name, wanted, is_relative, known_to)
    evidence = [pair(group, base, setting) for group in groups[1:]]
    verdicts = judge(evidence, metric.higher_is_better)
    shared = clock.overlapping(runs)
    rows = [_variant(base, base, chosen, shared, None, Verdict("baseline", failures(base)))]
    for group, found, verdict in zip(groups[1:], evidence, verdicts, strict=True):
        rows.append(_variant(group, base, chosen, shared, found, verdict))
    tested = sum(e.tested for e in evidence)
    return Comparison(
        recipe=mixing.recipe_text(kept),
        metric=metric.name,
        split=chosen,
        higher_is_better=metric.higher_is_better,
        margin=wanted,
        is_relative=is_relative,
        baseline=base.label,
        variants=tuple(rows),
        skipped=told,
        data=mixing.data_text(kept),
        hardware=mixing.hardware_text(kept),
        code=mixing.code_text(kept),
        notes=(*mixed, *notes(groups, chosen, baseline is None, tested), *notes_of(rows)),
    )


def _groups(runs: Sequence[Run]) -> list[Group]:
    """Runs by variant, in the order variants were met; labels that meet are told apart."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        key = (run.summary.variant_hash, run.summary.execution)
        found.setdefault(key, []).append(run)
    members = [sorted(group, key=lambda run: run.summary.seed) for group in found.values()]
    several = len({run.summary.recipe for run in runs}) > 1
    names = [_name(group[0], several) for group in members]
    executions = [group[0].summary.execution for group in members]
    labels = distinguish(names, executions, [group[0].path for group in members])
    return [
        Group(
            label,
            tuple(run for run in group if measures.trained(run.summary)),
            tuple(run for run in group if not measures.trained(run.summary)),
        )
        for label, group in zip(labels, members, strict=True)
    ]


def _name(run: Run, several_recipes: bool) -> str:
    label = readable(run.summary.variant, 60)
    return f"{readable(run.summary.recipe, 60)} {label}" if several_recipes else label


def _check_usable(groups: Sequence[Group], skipped: Sequence[Skipped]) -> None:
    if any(group.completed for group in groups):
        return
    failed = [run for group in groups for run in group.failed]
    reasons = [f"{run.path} failed: {error_text(run)}" for run in failed]
    reasons += [f"{s.path}: {s.reason}" for s in skipped]
    listed = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if reasons[3:] else "")
    raise UsageError(f"there is no completed run to compare: {listed or 'no run was named'}")


def _baseline(groups: Sequence[Group], wanted: str | None) -> Group:
    by_label = {group.label: group for group in groups}
    if wanted is not None:
        by_hash = {group.first.summary.variant_hash: group for group in groups}
        if wanted in by_hash:
            return by_hash[wanted]
        if wanted not in by_label:
            near = hint(wanted, by_label)
            raise UsageError(
                f"compare.baseline={wanted}: there is no such variant; "
                f"legal: {', '.join(map(repr, by_label))}{near}"
            )
        return by_label[wanted]
    complete = [group for group in groups if group.completed]
    plain = [group for group in complete if group.first.summary.precision == "fp32"]
    return min(plain or complete[:1], key=_changes)


def _changes(group: Group) -> int:
    """How many things were changed about a variant's mode, as far as its runs tell."""
    summary = group.first.summary
    label, row = summary.variant, summary.effective
    return label.count("+") + label.count(" x") + len(row.layers) + (not group.is_native)


def _split(groups: Sequence[Group], wanted: str) -> str:
    runs = [summary for group in groups for summary in group.by_seed.values()]
    has = {name: sum(measures.score(s, name) is not None for s in runs) for name in measures.SPLITS}
    if wanted == "auto":
        return next((name for name in measures.SPLITS if has[name] == len(runs)), "train")
    if not has[wanted]:
        legal = ", ".join(name for name in measures.SPLITS if has[name])
        raise UsageError(f"compare.split={wanted}: no run has such samples; legal: {legal}")
    return wanted


def _variant(
    group: Group,
    base: Group,
    split: str,
    shared: set[int],
    found: Evidence | None,
    verdict: Verdict,
) -> Variant:
    summary = group.first.summary
    values = list(measures.scores(group, split).values())
    whole = all(map(math.isfinite, values))
    sample = found.sample if found is not None and found.unit and whole else None
    doubt = measures.no_time_verdict(group, base, shared)
    return Variant(
        label=group.label,
        variant_hash=summary.variant_hash,
        precision=summary.precision,
        execution=summary.execution,
        runs=group.completed,
        failed=group.failed,
        step_time_ms=measures.step_time(group),
        step_time_ratio=measures.ratio(group, base, measures.step_ms, bool(doubt)),
        samples_per_second=measures.samples_per_second(group),
        throughput_ratio=measures.ratio(group, base, measures.throughput, bool(doubt)),
        no_time_verdict=doubt,
        memory_bytes=measures.memory(group),
        memory_ratio=measures.memory_ratio(group, base),
        metric=measures.mean_score(values),
        difference=estimate(sample) if sample is not None else None,
        equivalence=interval(sample, 1 - 2 * ALPHA) if sample is not None else None,
        verdict=verdict,
        substituted=substitutions.label(run.summary for run in group.completed),
    )
