"""Ratios of times: whether runs can be compared in time, and what a ratio's interval shows.

A machine drifts: it warms up, its clocks change, other processes use it. Runs that are compared in
pairs of equal seed share the drift if each pair is complete before the next one begins (`mprun
sweep`, or `mprun -m` with the seed listed first). If one variant ran with all seeds before the
other began (`mprun -m` with the seed listed last), the drift is part of every pair's ratio. It does
not spread the ratios, so an interval computed from their spread does not contain it. Runs that
shared the machine slowed each other. Two machines of one kind differ by some percent.

So a pair counts if both runs had one machine, and had it for themselves. If fewer than two pairs
do, there is no verdict. Machines are told apart by `hardware.host`; older records do not have it,
and equal hardware counts as one machine there.

`started_at` has seconds in older records and milliseconds in newer ones, and `wall_time_s` of older
records excludes the preparation of a run. Both checks report only what is certain: runs shorter
than a second that came one after the other are neither overlapping nor out of order.

A ratio is a geometric mean over pairs with a 95 % interval. There are three results: the interval
excludes 1, or it lies within a factor of `SAME` of 1, or the question is open. If the interval
reaches farther than a factor of `WIDE` from the ratio, the size of the ratio is not known either.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from mprun.compare.comparison import Estimate, Run
from mprun.compare.mixing import hardware
from mprun.compare.statistics import Sample, fewest_further, half_width
from mprun.records.run_record import Summary

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


class RunPeriod(NamedTuple):
    """When a run took place, in seconds since 1970."""

    start_s: float
    """The earliest possible start."""
    latest_start_s: float
    """The latest possible one: later by one unit of the record's last digit."""
    end_s: float
    """The earliest possible end: older wall times exclude the preparation of a run."""


def period(summary: Summary) -> RunPeriod | None:
    """When a run took place; None if its record has no valid time."""
    start_s, written_s = _seconds(summary.started_at), _seconds(summary.written_at)
    if start_s is None:
        return None
    last_digit_s = 0.001 if "." in summary.started_at else 1.0
    end_s = start_s + max(0.0, summary.wall_time_s)
    if written_s is not None:  # a run that was resumed ended later than its wall time says
        end_s = max(end_s, written_s)
    return RunPeriod(start_s, start_s + last_digit_s, end_s)


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
            if second.latest_start_s >= first.end_s:
                break
            # The second may have come first if both starts lie within one digit.
            if first.latest_start_s < second.end_s and _on_one_machine(one, other):
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
        if min(one.latest_start_s for one in pair) < last_start_s:
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
