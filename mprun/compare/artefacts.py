"""Artefacts: what explains a difference in step time, and is not the arithmetic.

A variant that took half the time of another may owe it to its precision, or to the machine: the
other's allocator returned memory and got it back (page faults), another process took the CPU, the
clock was slower, the runs drifted. Records hold each of these, so its share of a step can be worked
out, and with it the ratio without the artefact:

    ratio = variant / base * (1 - variant's share) / (1 - base's share)

If that ratio gives another verdict on speed, or if the artefact explains a large part of the
difference, there is no verdict: the measured ratio stays, without an interval. What takes an equal
share of both cancels. A cause that one of the records does not hold is left out, so older records
are judged as before. Causes are looked at one by one; two small ones do not add up.

Page faults are counted, and priced by a measurement. The other shares are estimates: load takes
time only where threads and load together need more than the CPUs there are; all of a step is taken
to slow with the clock; a drift is taken to be absent from the fast end of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from mprun.compare.comparison import Artefact, Estimate, Interval
from mprun.compare.measures import judge_ratio
from mprun.compare.statistics import geometric_mean
from mprun.console.formatting import readable
from mprun.records.run_record import Summary, page_fault_share

Pair = tuple[Summary, Summary]
"""The summaries of a variant and of the baseline, of one seed."""

LEAST = 1.02
"""A smaller change of the ratio is none: prices, clocks and shares are not known to a percent."""

COUNTED_PART = 0.1
"""Page faults that explain a larger part of a difference leave it without a verdict: they are
counted, and can be avoided."""

ESTIMATED_PART = 0.5
"""The same for estimated shares: these explain the larger part of the difference."""

MAX_SHARE = 0.95
"""A price that is too high must not take the whole step."""

STEADY_DRIFT = 1.05
"""Thirds of a steady run agree within this factor."""


@dataclass(frozen=True)
class Cause:
    """A cause that takes a share of a step."""

    name: str
    takes: str
    """Its subject and verb in a sentence: `page faults take`."""
    share: Callable[[Summary, Summary], float | None]
    """Its share of a run's step, beside another run; None if the record does not tell."""
    part: float
    """The part of a difference that it may explain, in logarithms of the ratios."""
    remedy: str


def artefacts(
    label: str, base_label: str, pairs: Sequence[Pair], causes: Sequence[Cause] | None = None
) -> tuple[Artefact, ...]:
    """What leaves a variant without a verdict on its times; empty if nothing does.

    Args:
        label: the variant's.
        base_label: the baseline's.
        pairs: the summaries whose times are compared.
        causes: by default `CAUSES`.
    """
    timed = [pair for pair in pairs if all((s.step_time_ms.median or 0.0) > 0 for s in pair)]
    if not timed:
        return ()
    shares = (_explained(label, base_label, timed, x) for x in causes or CAUSES)
    return (*_allocators(label, base_label, timed), *(x for x in shares if x is not None))


def _explained(label: str, base_label: str, pairs: Sequence[Pair], cause: Cause) -> Artefact | None:
    """The artefact of one cause; None if it changes no verdict, or is not recorded."""
    ours, theirs = [], []
    for own, base in pairs:
        share, base_share = cause.share(own, base), cause.share(base, own)
        if share is None or base_share is None:
            return None
        ours.append(min(share, MAX_SHARE))
        theirs.append(min(base_share, MAX_SHARE))
    if not any(
        _unsettles(_ratio(pairs, time), _ratio(pairs, time, ours, theirs).value, cause.part)
        for time in (_step_ms, _sample_ms)
    ):
        return None
    measured, without = _ratio(pairs, _step_ms).value, _ratio(pairs, _step_ms, ours, theirs).value
    text = (
        f"{cause.takes} {100 * fmean(theirs):.0f} % of {base_label}'s step and "
        f"{100 * fmean(ours):.0f} % of {label}'s; without that, {label} takes {without:.2f} of "
        f"the step time instead of {measured:.2f}"
    )
    return Artefact(cause.name, text, cause.remedy, without)


def _unsettles(measured: Estimate, without: float, part: float) -> bool:
    """Whether a ratio without an artefact gives another answer than the measured one.

    The measured interval moves with the ratio; shares are not known well enough to narrow it.
    """
    factor = without / measured.value
    change = abs(math.log(factor))
    if change < math.log(LEAST):
        return False
    around = measured.interval and Interval(*(factor * end for end in measured.interval))
    word = judge_ratio(measured).word
    if word != judge_ratio(measured._replace(value=without, interval=around)).word:
        return True
    return word != "same" and change > part * abs(math.log(measured.value))


Time = Callable[[Summary, float], float]
"""A time of a run, in ms, without a share of its step."""


def _ratio(
    pairs: Sequence[Pair],
    time: Time,
    ours: Sequence[float] | None = None,
    theirs: Sequence[float] | None = None,
) -> Estimate:
    """The variant's time over the baseline's, without these shares of each pair's steps."""
    none = [0.0] * len(pairs)
    rows = zip(pairs, ours or none, theirs or none, strict=True)
    return geometric_mean([time(own, x) / time(base, y) for (own, base), x, y in rows])


def _step_ms(summary: Summary, share: float) -> float:
    return (summary.step_time_ms.median or 0.0) * (1 - share)


def _sample_ms(summary: Summary, share: float) -> float:
    """The time for a sample, with the wait for its batch."""
    wait_ms = max(0.0, summary.data_time_ms.median or 0.0)
    return (_step_ms(summary, share) + wait_ms) / max(1, summary.batch_size)


# ---- shares --------------------------------------------------------------------------------------


def load_share(summary: Summary, _: Summary) -> float | None:
    """The part of the threads that found no CPU, because other processes or machines had it."""
    conditions, threads = summary.conditions, max(1, summary.backend.threads)
    if summary.hardware.device != "cpu" or conditions is None or conditions.other_load is None:
        return None
    taken = conditions.other_load + (conditions.steal or 0.0)
    available = summary.hardware.cores * (1 - taken)
    return min(1.0, max(0.0, 1 - available / threads))


def clock_share(summary: Summary, other: Summary) -> float | None:
    """The part of a step that the faster clock of the two would have saved."""
    own_mhz, other_mhz = _clock_mhz(summary), _clock_mhz(other)
    if not own_mhz or not other_mhz:
        return None
    return 1 - own_mhz / max(own_mhz, other_mhz)


def _clock_mhz(summary: Summary) -> float:
    """The CPU's clock; 0 on a GPU and where it is not known."""
    if summary.hardware.device != "cpu" or summary.conditions is None:
        return 0.0
    return max(0.0, summary.conditions.clock_mhz or 0.0)


def drift_share(summary: Summary, _: Summary) -> float | None:
    """The part of the median step by which it exceeds the fast end of its run.

    The ends lie the whole drift apart and the median between them, so half of it in logarithms.
    """
    drift = summary.conditions.drift if summary.conditions is not None else None
    if drift is None or drift <= 0:
        return None
    factor = max(drift, 1 / drift)
    return 1 - 1 / math.sqrt(factor) if factor > STEADY_DRIFT else 0.0


CAUSES = (
    Cause(
        "page_faults",
        "page faults take",
        lambda summary, _: page_fault_share(summary),
        COUNTED_PART,
        "run again with speed=auto, with which glibc keeps its memory",
    ),
    Cause(
        "load",
        "other processes take about",
        load_share,
        ESTIMATED_PART,
        "run again while nothing else runs",
    ),
    Cause(
        "clock",
        "a slower clock takes about",
        clock_share,
        ESTIMATED_PART,
        "run again with a fixed clock, or let the machine cool",
    ),
    Cause(
        "drift",
        "drift within the runs takes about",
        drift_share,
        ESTIMATED_PART,
        "run longer, on a machine that has warmed up",
    ),
)


def _allocators(label: str, base_label: str, pairs: Sequence[Pair]) -> Iterator[Artefact]:
    """Runs with different allocators, on a CPU: the difference is theirs as well."""
    for own, base in pairs:
        names = own.backend.allocator, base.backend.allocator
        if own.hardware.device == "cpu" and "unknown" not in names and names[0] != names[1]:
            ours, theirs = (readable(name, 20) for name in names)
            text = f"{base_label} ran with the allocator {theirs} and {label} with {ours}"
            yield Artefact("allocator", text, "run both with speed=auto", None)
            return
