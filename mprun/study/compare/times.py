"""Times of runs in pairs of equal seed: which may be compared, and what a ratio of them shows.

Order and sharing. A machine drifts. Pairs share the drift if each is complete before the next one
begins; if one variant ran with all seeds before the other, the drift is part of every pair's ratio
and does not spread the ratios, so an interval does not contain it. So a pair counts if both runs
had one machine, and had it for themselves; these checks report only what is certain.

Artefacts. Page faults, other processes or drift may take a share of a step. Records hold each of
these, so the ratio without it is known:

    ratio = variant / base * (1 - variant's share) / (1 - base's share)

If that ratio gives another verdict on speed, or if the artefact explains a large part of the
difference, there is no verdict. What takes an equal share of both cancels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Literal, NamedTuple

from mprun.records.console.formatting import readable
from mprun.records.run_record import Summary, page_fault_share
from mprun.study.compare.comparison import Artefact, Estimate, Interval, Run
from mprun.study.compare.load import RunGroup, hardware
from mprun.study.compare.statistics import Sample, fewest_further, geometric_mean, half_width

Pair = tuple[Summary, Summary]  # The summaries of a variant and of the baseline, of one seed

# ---- which pairs ---------------------------------------------------------------------------------

OVERLAPPED = "runs overlapped in time on one machine"
TWO_MACHINES = "the runs of a pair were on two machines"
TWO_KINDS = "the runs of a pair were on different hardware"
NOT_INTERLEAVED = "runs were not interleaved over seeds"
UNKNOWN = "it is not recorded when the runs began"  # records of other versions may lack it

# The last digit of `started_at`: a run began up to this much later than its record says
START_DIGIT_S = 0.001


class TimedPairs(NamedTuple):
    """The pairs whose times are compared."""

    pairs: Sequence[Pair]
    no_verdict: str  # Why their times allow no conclusion; empty if they allow one
    left_out: str  # Why times of further pairs are not used: `2 of 10 pairs: ...`; empty if all are


def timed_pairs(group: RunGroup, baseline: RunGroup, shared: set[int]) -> TimedPairs:
    """The pairs that had one machine for themselves; if fewer than two did, all, and why not."""
    if group is baseline or not (group.is_native and baseline.is_native):
        return TimedPairs((), "", "")
    ours, theirs = group.by_seed, baseline.by_seed
    native = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    pairs = [(own, base) for own, base in native if hardware(own) == hardware(base)]
    reasons = [_no_pair(*pair, shared) for pair in pairs]
    good = [pair for pair, reason in zip(pairs, reasons, strict=True) if not reason]
    wrong = [reason for reason in reasons if reason]
    if not wrong:
        return TimedPairs(pairs, TWO_KINDS if native and not pairs else _order(pairs), "")
    if len(good) < 2:  # one pair has no interval: show all, with the reason
        return TimedPairs(pairs, wrong[0], "")
    count = f"{len(wrong)} of {len(pairs)} pairs: {'; '.join(dict.fromkeys(wrong))}"
    return TimedPairs(good, _order(good), count)


def is_timed_pair(own: Summary, other: Summary, shared: set[int]) -> bool:
    """Whether two runs had one machine, with equal hardware, for themselves."""
    return hardware(own) == hardware(other) and not _no_pair(own, other, shared)


def _no_pair(own: Summary, other: Summary, shared: set[int]) -> str:
    """Why the times of two runs are not compared; empty if they are."""
    if id(own) in shared or id(other) in shared:  # by id: a Summary is mutable, so has no hash
        return OVERLAPPED
    return "" if _on_one_machine(own, other) else TWO_MACHINES


def _on_one_machine(one: Summary, other: Summary) -> bool:
    """Whether two runs had the same machine, as far as their records can tell."""
    hosts = (one.hardware.host, other.hardware.host)
    if None not in hosts:  # older records have no host
        return hosts[0] == hosts[1]
    ours, theirs = hardware(one), hardware(other)
    # The number of threads is a setting of the run, not of its machine
    return all(ours[name] == theirs[name] for name in ours if name != "threads")


class _Period(NamedTuple):
    """When a run took place, in seconds since 1970."""

    start_s: float
    end_s: float  # The earliest possible end


def _period(summary: Summary) -> _Period | None:
    """When a run took place; None if its record has no valid time."""
    start_s, written_s = _seconds(summary.started_at), _seconds(summary.written_at)
    if start_s is None:
        return None
    # A run that was resumed ended later than its wall time says.
    return _Period(start_s, max(start_s + max(0.0, summary.wall_time_s), written_s or 0.0))


def _seconds(text: str | None) -> float | None:
    """A time of a record, in seconds since 1970; None if it is not known or not valid."""
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def overlapping(runs: Iterable[Run]) -> set[int]:
    """The ids of the summaries of runs that certainly shared a machine with another run."""
    periods = [(when, run.summary) for run in runs if (when := _period(run.summary)) is not None]
    periods.sort(key=lambda item: item[0].start_s)
    ids: set[int] = set()
    for place, (first, one) in enumerate(periods):
        for second, other in periods[place + 1 :]:
            if second.start_s + START_DIGIT_S >= first.end_s:
                break  # nor does any later one overlap the first
            if _on_one_machine(one, other):
                ids |= {id(one), id(other)}
    return ids


def _order(pairs: Sequence[Pair]) -> str:
    """Why the order of pairs, each on one machine, allows no conclusion; empty if it does."""
    if len(pairs) < 2:
        return ""
    by_host: dict[str | None, list[tuple[_Period, _Period]]] = defaultdict(list)
    for own, other in pairs:
        one, two = _period(own), _period(other)
        if one is None or two is None:
            return UNKNOWN
        by_host[own.hardware.host].append((one, two))
    return "" if all(map(_is_interleaved, by_host.values())) else NOT_INTERLEAVED


def _is_interleaved(pairs: Sequence[tuple[_Period, _Period]]) -> bool:
    """Whether no pair certainly began before an earlier one was complete."""
    last_start_s = -math.inf
    for pair in sorted(pairs, key=lambda pair: min(pair).start_s):
        if min(pair).start_s + START_DIGIT_S < last_start_s:
            return False
        last_start_s = max(last_start_s, *(one.start_s for one in pair))
    return True


# ---- what a ratio shows --------------------------------------------------------------------------

# If the interval reaches beyond this factor from its ratio, more runs are needed: "1.2 times as
# fast" would be anything from 0.8 to 1.8
WIDE = 1.5

SAME = 1.05  # Ratios between 1 / 1.05 and 1.05 count as the same speed: 5 % seldom decide

Direction = Literal["higher", "lower", "same", "open"]


class RatioVerdict(NamedTuple):
    """The size of a ratio, as far as it is known."""

    word: Direction  # higher or lower than 1, the same within `SAME`, or open
    is_wide: bool  # Whether the interval is missing or reaches beyond `WIDE`
    more_seeds: int | None
    """About how many further seeds would settle whether the ratio differs from 1, or its size if
    that is settled; None if nothing is open, or if the number is not known."""


def judge_ratio(ratio: Estimate) -> RatioVerdict:
    """The verdict from a ratio's interval."""
    if ratio.interval is None:
        return RatioVerdict("open", True, None)
    low, high = ratio.interval
    # Of the logarithms, in which the interval is symmetric. Their spread is not stored: it follows
    # from the half width, which is proportional to it
    unit, mean = half_width(Sample(ratio.n, 0.0, 1.0)), math.log(ratio.value)
    sample = Sample(ratio.n, mean, max(0.0, math.log(high) - mean) / unit)
    is_wide = high > WIDE * ratio.value  # the lower end is as far away, in logarithms
    if low > 1 or high < 1:
        word: Direction = "higher" if low > 1 else "lower"
        more = (
            fewest_further(sample, lambda x: half_width(x) <= math.log(WIDE)) if is_wide else None
        )
        return RatioVerdict(word, is_wide, more)
    if low > 1 / SAME and high < SAME:
        return RatioVerdict("same", is_wide, None)
    return RatioVerdict("open", is_wide, fewest_further(sample, _is_settled))


def _is_settled(logarithms: Sample) -> bool:
    """Whether the ratio differs from 1, or is the same within `SAME`."""
    mean, half = abs(logarithms.mean), half_width(logarithms)
    return mean > half or mean + half < math.log(SAME)


# ---- artefacts -----------------------------------------------------------------------------------

# A smaller change of the ratio is none: prices and shares are not known to a percent
LEAST = 1.02

# Page faults that explain a larger part of a difference leave it without a verdict: they are
# counted, priced by a measurement, and can be avoided
COUNTED_PART = 0.1

# The same for estimated shares: these explain the larger part of the difference
ESTIMATED_PART = 0.5

MAX_SHARE = 0.95  # A page fault priced too high must not take the whole step: 0 has no logarithm

STEADY_DRIFT = 1.05  # Thirds of a steady run agree within this factor


@dataclass(frozen=True)
class Cause:
    """A cause that takes a share of a step."""

    name: str
    takes: str  # Its subject and verb in a sentence: `page faults take`
    share: Callable[[Summary], float | None]
    """Its share of a run's step; None if the record does not tell."""
    part: float  # The part of a difference that it may explain, in logarithms of the ratios
    remedy: str


def artefacts(label: str, base_label: str, pairs: Sequence[Pair]) -> tuple[Artefact, ...]:
    """What leaves a variant without a verdict on its times; empty if nothing does."""
    timed = [pair for pair in pairs if all((s.step_time_ms.median or 0.0) > 0 for s in pair)]
    if not timed:
        return ()
    shares = (_explained(label, base_label, timed, cause) for cause in CAUSES)
    return (*_allocators(label, base_label, timed), *(x for x in shares if x is not None))


def _explained(label: str, base_label: str, pairs: Sequence[Pair], cause: Cause) -> Artefact | None:
    """The artefact of one cause; None if it changes no verdict, or is not recorded."""
    ours, theirs = [], []
    for own, base in pairs:
        share, base_share = cause.share(own), cause.share(base)
        if share is None or base_share is None:  # older records, which are judged as before
            return None
        ours.append(min(share, MAX_SHARE))
        theirs.append(min(base_share, MAX_SHARE))
    none = [0.0] * len(pairs)
    # Both ratios of the table are checked: time per step, and samples per second with the wait for
    # data
    by_step, by_sample = (
        (_ratio(pairs, time, none, none), _ratio(pairs, time, ours, theirs).value)
        for time in (_step_ms, _sample_ms)
    )
    if not (_changes_answer(*by_step, cause.part) or _changes_answer(*by_sample, cause.part)):
        return None
    measured, without = by_step
    text = (
        f"{cause.takes} {100 * fmean(theirs):.0f} % of {base_label}'s step and "
        f"{100 * fmean(ours):.0f} % of {label}'s; without that, the time ratio of {label} would "
        f"be {without:.2f}, not {measured.value:.2f}"
    )
    return Artefact(cause.name, text, cause.remedy, without)


def _changes_answer(measured: Estimate, without: float, part: float) -> bool:
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
    # In logarithms, where factors add up: the part of the difference that the artefact explains
    return word != "same" and change > part * abs(math.log(measured.value))


def _ratio(
    pairs: Sequence[Pair],
    time: Callable[[Summary, float], float],
    ours: Sequence[float],
    theirs: Sequence[float],
) -> Estimate:
    """The variant's time over the baseline's, without these shares of each pair's steps."""
    rows = zip(pairs, ours, theirs, strict=True)
    return geometric_mean([time(own, x) / time(base, y) for (own, base), x, y in rows])


def _step_ms(summary: Summary, share: float) -> float:
    return (summary.step_time_ms.median or 0.0) * (1 - share)


def _sample_ms(summary: Summary, share: float) -> float:
    """The time for a sample, with the wait for its batch, which no artefact shortens."""
    wait_ms = max(0.0, summary.data_time_ms.median or 0.0)
    return (_step_ms(summary, share) + wait_ms) / max(1, summary.batch_size)


def _load_share(summary: Summary) -> float | None:
    """The part of the threads without a CPU, because other processes or machines had it."""
    conditions, threads = summary.conditions, max(1, summary.backend.threads)
    if summary.hardware.device != "cpu" or conditions is None or conditions.other_load is None:
        return None
    taken = conditions.other_load + (conditions.steal or 0.0)
    # On idle cores other processes cost nothing: only what the threads lack counts
    available = summary.hardware.cores * (1 - taken)
    return min(1.0, max(0.0, 1 - available / threads))


def drift_share(summary: Summary) -> float | None:
    """The part of the median step by which it exceeds the fast end of its run.

    A drift is taken to be absent from the fast end. The ends lie the whole drift apart and the
    median between them, so half of it in logarithms.
    """
    drift = summary.conditions.drift if summary.conditions is not None else None
    if drift is None or drift <= 0:
        return None
    factor = max(drift, 1 / drift)  # faster or slower over time: either end may be the fast one
    return 1 - 1 / math.sqrt(factor) if factor > STEADY_DRIFT else 0.0


CAUSES = (
    Cause(
        "page_faults",
        "page faults take",
        page_fault_share,
        COUNTED_PART,
        "run again with speed=auto, with which glibc keeps its memory",
    ),
    Cause(
        "load",
        "other processes take about",
        _load_share,
        ESTIMATED_PART,
        "run again while nothing else runs",
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
