"""What is taken from runs: scores, times and memory, alone and in pairs of equal seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from mprun.compare import interleaving as clock
from mprun.compare.mixing import hardware
from mprun.compare.rows import Estimate, Run, Spread
from mprun.compare.statistics import estimate, geometric_mean, summarise
from mprun.records.run_record import Memory, Summary, number

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
        return self.first.summary["execution"] == "native"

    @cached_property
    def by_seed(self) -> dict[int, Summary]:
        """The completed runs' summaries."""
        return {run.summary["seed"]: run.summary for run in self.completed}


def score(summary: Summary, split: str) -> float | None:
    """The run's metric over a split, of its last epoch; None where it has none."""
    last: Mapping[str, Any] = summary["history"][-1] if summary["history"] else {}
    places: dict[str, Mapping[str, Any]] = {
        "test": summary["test"],
        "validation": last.get("validation", {}),
        "train": last.get("train", summary["train"]),
    }
    value = places[split].get(summary["metric"]["name"])
    return None if value is None else number(value)


def trained(summary: Summary) -> bool:
    """Whether a run was completed and has a metric; it has none where every step was skipped."""
    has_metric = any(score(summary, split) is not None for split in SPLITS)
    return summary["status"] == "completed" and has_metric


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
    counts = [s["data"][f"{split}_samples"] for g in groups for s in g.by_seed.values()]  # type: ignore[literal-required]
    return 1 / min(counts) if metric == "accuracy" and min(counts) > 0 else 0.0


def step_time(group: Group) -> Spread | None:
    """The spread of a step's milliseconds; None where no run timed any."""
    rows: list[dict[str, Any]] = [dict(s["step_time_ms"]) for s in group.by_seed.values()]
    timed = [row for row in rows if None not in row.values()]
    if not timed:
        return None
    return Spread(*(median(row[key] for row in timed) for key in ("median", "p10", "p90")))


def step_ms(summary: Summary) -> float | None:
    """The median of a run's step times in milliseconds."""
    return summary["step_time_ms"]["median"]


def throughput(summary: Summary) -> float | None:
    """A run's samples per second."""
    return summary["samples_per_second"]


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
    rows = [summary["memory_bytes"] for summary in group.by_seed.values()]
    return {
        name: max((row[name] for row in rows if row[name] is not None), default=None)  # type: ignore[literal-required]
        for name in Memory.__annotations__
    }


def memory_ratio(group: Group, baseline: Group) -> float | None:
    """Peak over the baseline's; None as for `ratio`."""
    ours, theirs = memory(group).get("peak"), memory(baseline).get("peak")
    if group is baseline or not (group.is_native and baseline.is_native and ours and theirs):
        return None
    return ours / theirs
