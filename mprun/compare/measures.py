"""Figures of runs, alone and in pairs of equal seed: scores, memory, times and their ratios.

Times need care. A machine drifts: it warms up, its clocks change, other processes use it. Runs that
are compared in pairs of equal seed share the drift if each pair is complete before the next one
begins (`mprun sweep`, or `mprun -m` with the seed listed first). If one variant ran with all seeds
before the other began (`mprun -m` with the seed listed last), the drift is part of every pair's
ratio. It does not spread the ratios, so an interval computed from their spread does not contain it.
Runs that shared the machine slowed each other. Two machines of one kind differ by some percent.

So a pair counts if both runs had one machine, and had it for themselves. If fewer than two pairs
do, there is no verdict. Machines are told apart by `hardware.host`; where the system has no such
identity, equal hardware counts as one machine. Both checks report only what is certain.

A ratio is a geometric mean over pairs with a 95 % interval. There are three results: the interval
excludes 1, or it lies within a factor of `SAME` of 1, or the question is open. If the interval
reaches farther than a factor of `WIDE` from the ratio, the size of the ratio is not known either.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property
from statistics import median
from typing import Literal, NamedTuple

from mprun.compare.comparison import Estimate, Run, StepPercentiles
from mprun.compare.mixing import hardware
from mprun.compare.statistics import (
    Sample,
    estimate,
    fewest_further,
    geometric_mean,
    half_width,
    summarise,
)
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


OVERLAPPED = "runs overlapped in time on one machine"
TWO_MACHINES = "the runs of a pair were on two machines"
TWO_KINDS = "the runs of a pair were on different hardware"
NOT_INTERLEAVED = "runs were not interleaved over seeds"
UNKNOWN = "it is not recorded when the runs began"

WIDE = 1.5
"""If the interval reaches beyond this factor from its ratio, more runs are needed."""

SAME = 1.05
"""Ratios between 1 / 1.05 and 1.05 count as the same speed: 5 % seldom decide."""

Direction = Literal["higher", "lower", "same", "open"]


START_DIGIT_S = 0.001
"""The last digit of `started_at`: a run began up to this much later than its record says."""


class RunPeriod(NamedTuple):
    """When a run took place, in seconds since 1970."""

    start_s: float
    end_s: float
    """The earliest possible end."""


def period(summary: Summary) -> RunPeriod | None:
    """When a run took place; None if its record has no valid time."""
    start_s, written_s = _seconds(summary.started_at), _seconds(summary.written_at)
    if start_s is None:
        return None
    # A run that was resumed ended later than its wall time says.
    return RunPeriod(start_s, max(start_s + max(0.0, summary.wall_time_s), written_s or 0.0))


def _seconds(text: str | None) -> float | None:
    """A time of a record, in seconds since 1970; None if it is not known or not valid."""
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def overlapping(runs: Iterable[Run]) -> set[int]:
    """The ids of the summaries of runs that certainly shared a machine with another run."""
    periods = [(when, run.summary) for run in runs if (when := period(run.summary)) is not None]
    periods.sort(key=lambda item: item[0].start_s)
    ids: set[int] = set()
    for place, (first, one) in enumerate(periods):
        for second, other in periods[place + 1 :]:
            if second.start_s + START_DIGIT_S >= first.end_s:
                break
            if _on_one_machine(one, other):
                ids |= {id(one), id(other)}
    return ids


def _on_one_machine(one: Summary, other: Summary) -> bool:
    """Whether two runs had the same machine, as far as their records can tell."""
    hosts = (one.hardware.host, other.hardware.host)
    if None not in hosts:
        return hosts[0] == hosts[1]
    return _properties(one) == _properties(other)


def _properties(summary: Summary) -> tuple[object, ...]:
    """The machine's properties; runs with other threads may share it."""
    return tuple(value for name, value in hardware(summary).items() if name != "threads")


Pairs = Sequence[tuple[Summary, Summary]]
"""The summaries of a variant and of the baseline, of each seed in common."""


class TimedPairs(NamedTuple):
    """The pairs whose times are compared."""

    pairs: Pairs
    no_verdict: str
    """Why their times allow no conclusion; empty if they allow one."""
    left_out: str
    """Why times of further pairs are not used: `2 of 10 pairs: ...`; empty if all are."""


def timed_pairs(pairs: Pairs, shared: set[int]) -> TimedPairs:
    """The pairs whose times are compared: those that had one machine for themselves.

    If fewer than two are left, all pairs are taken, with the reason why they allow no conclusion.

    Args:
        pairs: on equal hardware.
        shared: `overlapping` of all runs.
    """
    reasons = [_no_pair(*pair, shared) for pair in pairs]
    good = [pair for pair, reason in zip(pairs, reasons, strict=True) if not reason]
    wrong = [reason for reason in reasons if reason]
    if not wrong:
        return TimedPairs(pairs, _no_time_verdict(pairs), "")
    if len(good) < 2:
        return TimedPairs(pairs, wrong[0], "")
    count = f"{len(wrong)} of {len(pairs)} pairs: {'; '.join(dict.fromkeys(wrong))}"
    return TimedPairs(good, _no_time_verdict(good), count)


def is_timed_pair(own: Summary, other: Summary, shared: set[int]) -> bool:
    """Whether two runs had one machine, with equal hardware, for themselves."""
    return hardware(own) == hardware(other) and not _no_pair(own, other, shared)


def _no_pair(own: Summary, other: Summary, shared: set[int]) -> str:
    """Why the times of two runs are not compared; empty if they are."""
    if id(own) in shared or id(other) in shared:
        return OVERLAPPED
    return "" if _on_one_machine(own, other) else TWO_MACHINES


def is_interleaved(pairs: Sequence[tuple[RunPeriod, RunPeriod]]) -> bool:
    """Whether no pair certainly began before an earlier one was complete."""
    in_order = sorted(pairs, key=lambda pair: min(pair).start_s)
    last_start_s = -float("inf")
    for pair in in_order:
        if min(pair).start_s + START_DIGIT_S < last_start_s:
            return False
        last_start_s = max(last_start_s, *(one.start_s for one in pair))
    return True


def _no_time_verdict(pairs: Pairs) -> str:
    """Why the times of pairs, each on one machine, allow no conclusion; empty if they allow one."""
    if len(pairs) < 2:
        return ""
    by_host: dict[str | None, list[tuple[RunPeriod, RunPeriod]]] = defaultdict(list)
    for own, other in pairs:
        one, two = period(own), period(other)
        if one is None or two is None:
            return UNKNOWN
        by_host[own.hardware.host].append((one, two))
    return "" if all(map(is_interleaved, by_host.values())) else NOT_INTERLEAVED


class RatioVerdict(NamedTuple):
    """The size of a ratio, as far as it is known."""

    word: Direction
    """higher or lower than 1, the same within `SAME`, or open."""
    is_wide: bool
    """Whether the interval is missing or reaches beyond `WIDE`."""
    more_seeds: int | None
    """About how many further seeds would settle whether the ratio differs from 1, or its size if
    that is settled; None if nothing is open, or if the number is not known."""


def judge_ratio(ratio: Estimate) -> RatioVerdict:
    """The verdict from a ratio's interval."""
    if ratio.interval is None:
        return RatioVerdict("open", True, None)
    low, high = ratio.interval
    sample = _logarithms(ratio, high)
    is_wide = high > WIDE * ratio.value
    if low > 1 or high < 1:
        word: Direction = "higher" if low > 1 else "lower"
        more = fewest_further(sample, _is_narrow) if is_wide else None
        return RatioVerdict(word, is_wide, more)
    if low > 1 / SAME and high < SAME:
        return RatioVerdict("same", is_wide, None)
    return RatioVerdict("open", is_wide, fewest_further(sample, _is_settled))


def _logarithms(ratio: Estimate, high: float) -> Sample:
    """The logarithms behind a ratio, whose interval is symmetric in them."""
    unit = half_width(Sample(ratio.n, 0.0, 1.0))
    mean = math.log(ratio.value)
    return Sample(ratio.n, mean, max(0.0, math.log(high) - mean) / unit)


def _is_narrow(logarithms: Sample) -> bool:
    return half_width(logarithms) <= math.log(WIDE)


def _is_settled(logarithms: Sample) -> bool:
    """Whether the ratio differs from 1, or is the same within `SAME`."""
    mean, half = abs(logarithms.mean), half_width(logarithms)
    return mean > half or mean + half < math.log(SAME)
