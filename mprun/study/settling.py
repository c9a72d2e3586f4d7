"""The comparison of the runs in folders, and what the looks of a study have settled so far.

A study with `seeds=auto` has a plan of looks in its sweep.json. Whoever asks (the study between two
seeds, another process, `mprun compare` a year later) works out the same verdicts from the plan and
the records: nothing else is stored, so a kill at any moment loses no decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mprun.config.settings import CompareSettings
from mprun.errors import UsageError
from mprun.records.console.formatting import counted
from mprun.records.run_folder import LookPlan, StudyPlan, file_names, read_study_plan, study_of_runs
from mprun.study.compare.comparison import Comparison, Run, Variant
from mprun.study.compare.decision import two_sides
from mprun.study.compare.load import find_runs, others_in
from mprun.study.compare.looks import Look, PlannedLooks, planned_looks
from mprun.study.compare.notes import ASPECTS
from mprun.study.compare.statistics import ALPHA
from mprun.study.compare.verdicts import compare
from mprun.study.report.cells import difference_span


def look_plan(limit: int, metric: str, split: str, settings: CompareSettings) -> LookPlan:
    """The plan of looks of a new study of at most `limit` seeds."""
    looks = planned_looks(limit)
    return LookPlan(
        seeds=tuple(look.pairs for look in looks),
        levels=tuple(look.level for look in looks),
        metric=metric,
        split=split,
        margin=settings.margin,
        relative_margin=settings.relative_margin,
        weights=settings.weights,
    )


def compared(
    paths: Sequence[Path], settings: CompareSettings, alpha: float | None = None
) -> Comparison:
    """The comparison of the runs in these folders; those of one study may be of several machines.

    `alpha` is the level of the verdicts, over all looks of a study together; None for 5 %.

    Raises:
        UsageError: there is no run, or the runs cannot be compared.
    """
    alpha = ALPHA if alpha is None else alpha
    runs, skipped = find_runs(paths)
    study = study_of_runs([run.path for run in runs])
    looks = None
    if not (settings.json and len(paths) == 2):
        settings, looks = _planned(study, runs, settings, alpha)
    # several machines may work on one study: that is no mistake of the user's
    mix: Sequence[str] = settings.mix if study is None else [*settings.mix, "hardware"]
    # only a decision is between folders
    sides, first, mix = two_sides(paths if settings.json else (), runs, mix)
    return compare(
        sides,
        skipped,
        margin=settings.margin,
        relative_margin=settings.relative_margin,
        baseline=settings.baseline or first,
        split=settings.split,
        weights=settings.weights,
        mix=mix,
        beside=() if study is None else others_in(study, runs),
        alpha=alpha,
        looks=looks,
        margins=settings.margins,
    )


def _planned(
    study: Path | None, runs: Sequence[Run], settings: CompareSettings, alpha: float
) -> tuple[CompareSettings, PlannedLooks | None]:
    """The looks of a study, and its settings where the user gave no others."""
    try:
        plan = None if study is None else read_study_plan(study)
    except UsageError:  # a note says so: see `with_open_runs`
        plan = None
    if plan is None or plan.looks is None:
        return settings, None
    first = next(iter(plan.variants))
    own = [run.summary for run in runs if run.path.name in _folders(plan)[first]]
    hashes = {summary.variant_hash for summary in own}
    if settings.baseline not in {None, first, *hashes} or not hashes:
        return settings, None  # the looks were for the study's own baseline
    names = ("margin", "relative_margin", "split", "weights")
    fixed = {k: getattr(plan.looks, k) for k in names}
    default = CompareSettings()
    fixed = {k: v for k, v in fixed.items() if getattr(settings, k) == getattr(default, k)}
    levels = [alpha / ALPHA * level for level in plan.looks.levels]
    looks = tuple(map(Look, plan.looks.seeds, levels))
    settings = replace(settings, baseline=next(iter(hashes)), **fixed)
    return settings, PlannedLooks(plan.seeds, looks)


def _folders(plan: StudyPlan) -> dict[str, set[str]]:
    """A variant's name to the names of its runs' folders."""
    slugs = file_names(plan.variants)
    return {name: {f"{slug}-seed{seed}" for seed in plan.seeds} for name, slug in slugs.items()}


@dataclass(frozen=True)
class Settled:
    """What the looks of a study have shown so far."""

    closed: Mapping[str, str]  # Variants that need no more runs, to why
    after: int = 0  # Seeds at the last look; 0 before the first
    lines: Mapping[str, str] = field(default_factory=dict)
    """A sentence on each variant but the baseline."""


def settled(folder: Path, plan: StudyPlan) -> Settled:
    """What the records in a study's folder settle; nothing without looks, or before the first."""
    if plan.looks is None:
        return Settled({})
    try:
        comparison = compared([folder], CompareSettings(mix=[*ASPECTS]))  # the report asks
    except UsageError:
        return Settled(_failed(folder, plan))
    names = {path: name for name, paths in _folders(plan).items() for path in paths}
    rows = {
        names[run.path.name]: variant
        for variant in comparison.variants[1:]
        for run in (*variant.runs, *variant.failed)
        if run.path.name in names  # not one that somebody put into the folder
    }
    closed: dict[str, str] = {
        name: v.verdict.closed for name, v in rows.items() if v.verdict.closed
    }
    baseline, *others = plan.variants
    if not set(others) - closed.keys():
        closed[baseline] = "no other variant is open"
    after = max((look.pairs for v in rows.values() for look in v.looks), default=0)
    lines = {name: line(comparison, variant, plan.looks) for name, variant in rows.items()}
    return Settled(closed, after, lines)


def _failed(folder: Path, plan: StudyPlan) -> dict[str, str]:
    """Every variant, where none of the first look's runs is complete."""
    assert plan.looks is not None
    first = replace(plan, seeds=plan.seeds[: plan.looks.seeds[0]])
    ended = {run.path.name for run in find_runs([folder]).runs}
    has_ended = all(names <= ended for names in _folders(first).values())
    return dict.fromkeys(plan.variants, "no run is complete") if has_ended else {}


def line(comparison: Comparison, variant: Variant, plan: LookPlan) -> str:
    """`equivalent after 4 seeds, -0.1 to +0.2 points`; `open after 7, ..., next look after 10`."""
    verdict, looks = variant.verdict, variant.looks
    if not looks:
        return f"open, first look after {counted(plan.seeds[0], 'seed')}"
    last = looks[-1]
    word = verdict.closed if verdict.word == "inconclusive" else verdict.word
    text = f"{word or 'open'} after {last.pairs} seeds"
    if last.interval is not None:
        unit = "%" if comparison.is_relative else "points"
        text += f", {difference_span(comparison, last.interval)} {unit}"
    if not verdict.closed:
        text += f", next look after {next(n for n in plan.seeds if n > last.pairs)}"
    elif verdict.word == "inconclusive" and verdict.more_seeds:
        text += f", it would take about {counted(verdict.more_seeds, 'more seed')}"
    return text
