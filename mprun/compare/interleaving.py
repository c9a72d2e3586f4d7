"""Whether step times of runs can be compared: what the times at which the runs began tell.

A machine drifts: it warms up, its clocks change, others use it. Runs that are compared in pairs of
equal seed share the drift where each pair is complete before the next one begins (`mprun sweep`, or
`mprun -m` with the seed listed first). Where one variant ran with all seeds before the other began
(`mprun -m` with the seed listed last), the drift is part of every pair's ratio. It does not spread
the ratios, so no interval that is computed from their spread contains it. Runs that shared the
machine slowed each other.

`started_at` is known to a second in older records and to a millisecond in newer ones, and
`wall_time_s` leaves out the preparation of a run. Both checks report only what is certain: runs
shorter than a second that came one after the other are neither overlapping nor out of order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from mprun.compare.mixing import hardware
from mprun.compare.rows import Run
from mprun.records.run_record import Summary

OVERLAPPED = "runs overlapped in time on one machine"
NOT_INTERLEAVED = "runs were not interleaved over seeds"
UNKNOWN = "it is not recorded when the runs began"


class Span(NamedTuple):
    """When a run took place, in seconds since 1970."""

    start_s: float
    """At the earliest."""
    latest_start_s: float
    """Its start is known no better than to the last digit of the record."""
    wall_time_s: float

    @property
    def end_s(self) -> float:
        """At the earliest: the preparation of a run is not part of its wall time."""
        return self.start_s + self.wall_time_s


def span(summary: Summary) -> Span | None:
    """When a run took place; None where its record holds no time."""
    try:
        start_s = datetime.fromisoformat(summary.started_at).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    last_digit_s = 0.001 if "." in summary.started_at else 1.0
    return Span(start_s, start_s + last_digit_s, max(0.0, summary.wall_time_s))


def overlapping(runs: Iterable[Run]) -> set[int]:
    """The ids of the summaries of runs that certainly ran while another did on such a machine."""
    spans = [(when, run.summary) for run in runs if (when := span(run.summary)) is not None]
    spans.sort(key=lambda item: item[0].start_s)
    found: set[int] = set()
    for place, (first, one) in enumerate(spans):
        for second, other in spans[place + 1 :]:
            if second.latest_start_s >= first.end_s:
                break
            # The second may have come first where both starts lie within one digit.
            if first.latest_start_s < second.end_s and _machine(one) == _machine(other):
                found |= {id(one), id(other)}
    return found


def _machine(summary: Summary) -> tuple[object, ...]:
    """What is known of the machine; runs with other threads may share it."""
    return tuple(value for name, value in hardware(summary).items() if name != "threads")


def is_interleaved(pairs: Sequence[tuple[Span, Span]]) -> bool:
    """Whether no pair certainly began before an earlier one was complete."""
    in_order = sorted(pairs, key=lambda pair: min(pair).start_s)
    last_start_s = -float("inf")
    for pair in in_order:
        if min(one.latest_start_s for one in pair) < last_start_s:
            return False
        last_start_s = max(last_start_s, *(one.start_s for one in pair))
    return True


def no_time_verdict(
    ours: Mapping[int, Summary], theirs: Mapping[int, Summary], shared: set[int]
) -> str:
    """Why nothing can be concluded from two variants' times; empty where something can.

    Args:
        ours: the summaries of a variant by seed, of the pairs that count.
        theirs: those of the baseline with the same seeds.
        shared: `overlapping` of all runs.
    """
    pairs = [(span(ours[seed]), span(theirs[seed])) for seed in ours]
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    if any(id(s) in shared for rows in (ours, theirs) for s in rows.values()):
        return OVERLAPPED
    if len(pairs) < 2:
        return ""
    if len(known) < len(pairs):
        return UNKNOWN
    return "" if is_interleaved(known) else NOT_INTERLEAVED
