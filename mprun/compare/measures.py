"""What is taken from runs: scores, times and memory, alone and in pairs of equal seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from statistics import median

from mprun.compare import interleaving as clock
from mprun.compare.mixing import hardware
from mprun.compare.rows import Estimate, Run, Spread
from mprun.compare.statistics import estimate, geometric_mean, summarise
from mprun.records.run_record import Memory, Number, Scores, Summary, TrainScore, number

SPLITS = ("test", "validation", "train")


@dataclass(frozen=True)
class Group:
    """The runs of a variant."""

    label: str
    completed: tuple[Run, ...]
    """By seed."""
    failed: tuple[Run, ...] = field(default=())

    @property
    def first(self) -> Run:
        """One that says what they have in common."""
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
    """The run's metric over a split, of its last epoch; None where it has none."""
    last = summary.history[-1] if summary.history else None
    rows: dict[str, Scores | TrainScore | None] = {
        "test": summary.test,
        "validation": last.validation if last else None,
        "train": last.train if last else summary.train,
    }
    value: Number | None = getattr(rows[split], summary.metric.name, None)
    return None if value is None else number(value)


def trained(summary: Summary) -> bool:
    """Whether a run was completed and has a metric; it has none where every step was skipped."""
    has_metric = any(score(summary, split) is not None for split in SPLITS)
    return summary.status == "completed" and has_metric


def scores(group: Group, split: str) -> dict[int, float]:
    """Seed to metric, NaN and infinities included; seeds without one are left out."""
    found = {seed: score(summary, split) for seed, summary in group.by_seed.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def mean_score(values: Sequence[float]) -> Estimate | None:
    """The mean over seeds; NaN or infinite, and without an interval, where one of them is."""
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Estimate(sum(values) / len(values), None, len(values))
    return estimate(summarise(values))


def resolution(groups: Sequence[Group], metric: str, split: str) -> float:
    """The step in which a metric is known: an accuracy moves by whole samples."""
    rows = [s.data for g in groups for s in g.by_seed.values()]
    counts: list[int] = [getattr(row, f"{split}_samples") for row in rows]
    return 1 / min(counts) if metric == "accuracy" and min(counts) > 0 else 0.0


def step_time(group: Group) -> Spread | None:
    """The spread of a step's milliseconds; None where no run timed any."""
    rows = [s.step_time_ms for s in group.by_seed.values()]
    timed = [
        (row.median, row.p10, row.p90)
        for row in rows
        if row.median is not None and row.p10 is not None and row.p90 is not None
    ]
    if not timed:
        return None
    return Spread(*(median(column) for column in zip(*timed, strict=True)))


def step_ms(summary: Summary) -> float | None:
    """The median of a run's step times in milliseconds."""
    return summary.step_time_ms.median


def throughput(summary: Summary) -> float | None:
    """A run's samples per second."""
    return summary.samples_per_second


def samples_per_second(group: Group) -> float | None:
    """The median over runs."""
    rates = [throughput(summary) for summary in group.by_seed.values()]
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def comparable(group: Group, baseline: Group) -> list[int]:
    """The seeds whose times are compared: run by both, on equal hardware, natively."""
    if group is baseline or not (group.is_native and baseline.is_native):
        return []
    ours, theirs = group.by_seed, baseline.by_seed
    common = sorted(ours.keys() & theirs.keys())
    return [seed for seed in common if hardware(ours[seed]) == hardware(theirs[seed])]


def ratio(
    group: Group, baseline: Group, figure: Callable[[Summary], float | None], no_interval: bool
) -> Estimate | None:
    """A figure over the baseline's, in pairs of equal seed on equal hardware.

    Args:
        group: the variant.
        baseline: what it is set against.
        figure: what is compared.
        no_interval: whether the pairs' spread does not tell how far off the ratio may be.

    Returns:
        None for the baseline itself, where either is emulated, and where no pair has the figure.
    """
    ratios = []
    for seed in comparable(group, baseline):
        value = figure(group.by_seed[seed]) or 0.0
        base = figure(baseline.by_seed[seed]) or 0.0
        if value > 0 and base > 0:
            ratios.append(value / base)
    if not ratios:
        return None
    found = geometric_mean(ratios)
    return found._replace(interval=None) if no_interval else found


def no_time_verdict(group: Group, baseline: Group, shared: set[int]) -> str:
    """Why times of the variant are compared without an interval; empty where they need not be."""
    seeds = comparable(group, baseline)
    ours, theirs = ({s: g.by_seed[s] for s in seeds} for g in (group, baseline))
    return clock.no_time_verdict(ours, theirs, shared)


def memory(group: Group) -> dict[str, int | None]:
    """Bytes by category; the largest over runs."""
    rows = [summary.memory_bytes for summary in group.by_seed.values()]
    return {
        part.name: max(
            (n for row in rows if (n := getattr(row, part.name)) is not None), default=None
        )
        for part in fields(Memory)
    }


def memory_ratio(group: Group, baseline: Group) -> float | None:
    """Peak over the baseline's; None as for `ratio`."""
    ours, theirs = memory(group).get("peak"), memory(baseline).get("peak")
    if group is baseline or not (group.is_native and baseline.is_native and ours and theirs):
        return None
    return ours / theirs
