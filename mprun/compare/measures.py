"""Figures of runs: scores, times and memory, alone and in pairs of equal seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from statistics import median

from mprun.compare.comparison import Estimate, Run, StepPercentiles
from mprun.compare.mixing import hardware
from mprun.compare.statistics import estimate, geometric_mean, summarise
from mprun.records.run_record import Memory, Metric, Scores, Summary, number

SPLITS = ("test", "validation", "train")


@dataclass(frozen=True)
class RunGroup:
    """The runs of a variant."""

    label: str
    completed: tuple[Run, ...]
    """By seed."""
    failed: tuple[Run, ...] = field(default=())

    @property
    def first(self) -> Run:
        """A run, for the fields that all have in common."""
        return (self.completed or self.failed)[0]

    @property
    def is_native(self) -> bool:
        """Whether times and memory are the hardware's."""
        return self.first.summary.execution == "native"

    @cached_property
    def by_seed(self) -> dict[int, Summary]:
        """The completed runs' summaries."""
        return {run.summary.seed: run.summary for run in self.completed}


def score(summary: Summary, split: str) -> float | None:
    """The metric of the run's last epoch over a split; None if the run has none."""
    last = summary.history[-1] if summary.history else None
    trained = Scores(loss=summary.train.loss, accuracy=None)
    rows: dict[str, Scores | None] = {
        "test": summary.test,
        "validation": last.validation if last else None,
        "train": last.train if last else trained,
    }
    scores = rows[split]
    value = None if scores is None else scores.value(summary.metric.name)
    return None if value is None else number(value)


def is_fraction(metric: Metric, values: Iterable[float]) -> bool:
    """Whether a metric's differences are points: an accuracy, or one from 0 to 1, more is better.

    Those of any other metric are shares of the baseline's mean, like those of a loss.

    Args:
        metric: its name and direction.
        values: of all runs; those that are not finite do not count.
    """
    if metric.name == "accuracy":
        return True
    finite = [value for value in values if math.isfinite(value)]
    return metric.higher_is_better and bool(finite) and all(0 <= x <= 1 for x in finite)


def is_partial(summary: Summary, split: str) -> bool:
    """Whether a time limit left a part of the split out of the metric."""
    last = summary.history[-1].validation if summary.history else None
    scores = {"test": summary.test, "validation": last}.get(split)
    return scores is not None and scores.samples is not None


def has_result(summary: Summary) -> bool:
    """Whether a run completed with a metric; without one, every step was skipped.

    An observed loop need not log any.
    """
    has_metric = any(score(summary, split) is not None for split in SPLITS)
    return summary.status == "completed" and (has_metric or summary.observed)


def scores(group: RunGroup, split: str) -> dict[int, float]:
    """Seed to metric, NaN and infinities included, without the seeds that have no metric."""
    values = {seed: score(summary, split) for seed, summary in group.by_seed.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def mean_score(values: Sequence[float]) -> Estimate | None:
    """The mean over seeds; NaN or infinite, and without an interval, if one of them is."""
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Estimate(sum(values) / len(values), None, len(values))
    return estimate(summarise(values))


def resolution(groups: Sequence[RunGroup], metric: str, split: str) -> float:
    """The smallest step of a metric: an accuracy changes by whole samples."""
    rows = [s.data for g in groups for s in g.by_seed.values()]
    counts: list[int] = [getattr(row, f"{split}_samples") for row in rows]
    return 1 / min(counts) if metric == "accuracy" and min(counts) > 0 else 0.0


def step_percentiles(group: RunGroup) -> StepPercentiles | None:
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


def samples_per_second(group: RunGroup) -> float | None:
    """The median over runs."""
    rates = [s.samples_per_second for s in group.by_seed.values()]
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def comparable_pairs(group: RunGroup, baseline: RunGroup) -> list[tuple[Summary, Summary]]:
    """The summaries whose times are compared, the variant's and the baseline's of each seed.

    Both ran it, on equal hardware, natively.
    """
    pairs = native_pairs(group, baseline)
    return [(own, base) for own, base in pairs if hardware(own) == hardware(base)]


def native_pairs(group: RunGroup, baseline: RunGroup) -> list[tuple[Summary, Summary]]:
    """The summaries of the variant and the baseline of each seed that both ran natively."""
    if group is baseline or not (group.is_native and baseline.is_native):
        return []
    ours, theirs = group.by_seed, baseline.by_seed
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def ratio(
    pairs: Sequence[tuple[Summary, Summary]],
    figure: Callable[[Summary], float | None],
    no_interval: bool,
) -> Estimate | None:
    """A figure over the baseline's.

    Args:
        pairs: `comparable_pairs`.
        figure: what is compared.
        no_interval: whether the pairs' spread is no measure of the ratio's error.

    Returns:
        None if no pair has the figure.
    """
    ratios = []
    for own, other in pairs:
        value, base = figure(own) or 0.0, figure(other) or 0.0
        if value > 0 and base > 0 and 0 < value / base < math.inf:
            ratios.append(value / base)
    if not ratios:
        return None
    mean = geometric_mean(ratios)
    return mean._replace(interval=None) if no_interval else mean


def memory(group: RunGroup) -> dict[str, int | None]:
    """Bytes by category; the largest over runs."""
    rows = [summary.memory_bytes for summary in group.by_seed.values()]
    return {
        part.name: max(
            (n for row in rows if (n := getattr(row, part.name)) is not None), default=None
        )
        for part in fields(Memory)
    }


def memory_ratio(group: RunGroup, baseline: RunGroup) -> float | None:
    """Peak over the baseline's; None for the baseline itself, and if either is emulated."""
    ours, theirs = memory(group).get("peak"), memory(baseline).get("peak")
    if group is baseline or not (group.is_native and baseline.is_native and ours and theirs):
        return None
    return ours / theirs
