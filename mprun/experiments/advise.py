"""Which mode to take: a decision over a comparison, with a reason for every mode that lost.

A mode may be taken where all of this holds:

    its metric is shown to be equivalent to the baseline's within the margin, or better
    no run of it failed, and none shows a numerical alarm
    its step time (or its memory) is smaller than the baseline's: the ratio's interval lies below 1

Of those that may, the one with the smallest ratio is taken; where none may, the baseline. A mode
about which the trials cannot tell is not taken: not shown to be worse is not shown to be as good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from mprun.compare.digits import counted
from mprun.compare.rows import Advice, Comparison, Estimate, Variant
from mprun.experiments.trials import Outcome
from mprun.records.run_record import Summary

Objective = Literal["time", "memory"]
SAME_MEMORY = 1.01
"""Peaks within this factor are the same."""
NOUN = {"time": "step time", "memory": "peak memory"}


def advise(
    comparison: Comparison,
    alarms: Mapping[str, Sequence[str]],
    objective: Objective,
    screened_out: Mapping[str, str] | None = None,
    not_tried: Mapping[str, str] | None = None,
) -> Advice:
    """The decision.

    Args:
        comparison: the trials', on validation data.
        alarms: a variant's label to what is alarming about its runs.
        objective: what is to be small.
        screened_out: modes whose trials ended early and are not in the comparison, to the reason.
        not_tried: modes that had no trial, to the reason.
    """
    baseline, *others = comparison.variants
    refused = {v.label: _refusal(v, alarms.get(v.label, ()), objective) for v in others}
    may = [v for v in others if refused[v.label] is None]
    best = _best(may, objective) if may else baseline
    lost = dict(screened_out or {})
    lost |= {label: reason for label, reason in refused.items() if reason is not None}
    for v in may:
        if v is not best:
            less = "is faster with as little" if _is_tie(v, best, objective) else "needs less"
            lost[v.label] = f"{_ratio_text(v, objective)}; {best.label} {less}"
    if best is baseline:
        reason = f"no other mode was shown to need less {NOUN[objective]} at an equal metric"
    else:
        lost[baseline.label] = f"{best.label} needs {_ratio_text(best, objective)}"
        reason = f"{_ratio_text(best, objective)}, {comparison.metric} {best.verdict.word}"
    notes = tuple(_doubts(may, best, others, objective))
    return Advice(best.label, reason, lost, dict(not_tried or {}), notes)


def _best(may: Sequence[Variant], objective: Objective) -> Variant:
    """The smallest; of those whose memory is as small, the fastest."""
    least = min(may, key=lambda v: _value(v, objective))
    if objective == "time":
        return least
    equal = [v for v in may if _is_tie(v, least, objective)]
    return min(equal, key=lambda v: v.step_time_ratio.value if v.step_time_ratio else math.inf)


def _is_tie(variant: Variant, best: Variant, objective: Objective) -> bool:
    """Whether two peaks differ by a hundredth at most: a few bytes choose nothing."""
    if objective == "time":
        return False
    ratio = _value(variant, objective) / _value(best, objective)
    return 1 / SAME_MEMORY <= ratio <= SAME_MEMORY


def _refusal(variant: Variant, alarms: Sequence[str], objective: Objective) -> str | None:
    """Why a mode cannot be taken, or None."""
    if variant.execution == "emulated":
        return (
            "emulated here: what its own arithmetic would cost on hardware that has it cannot "
            "be measured on this machine"
        )
    if variant.verdict.word not in ("equivalent", "better"):
        return f"{variant.verdict}: {variant.verdict.reason}"
    if alarms:
        return f"numerical alarm: {alarms[0]}"
    if not _is_smaller(variant, objective):
        return _no_gain(variant, objective)
    if objective == "time" and variant.substituted:
        return f"{variant.substituted}: {_ratio_text(variant, objective)}, no gain of float16"
    return None


def _no_gain(variant: Variant, objective: Objective) -> str:
    """What was measured of a mode that is not shown to need less."""
    ratio = variant.step_time_ratio
    if objective == "memory" or ratio is None:
        gain = "not smaller" if objective == "memory" else "not faster"
        return f"{gain}: {_ratio_text(variant, objective)}"
    interval = ratio.interval
    if interval is not None and interval.low > 1:
        return f"slower: {_ratio_text(variant, objective)}"
    pairs = counted(ratio.n, "pair")
    if variant.no_time_verdict:
        pairs += f"; {variant.no_time_verdict}"
    proven = "not proven" if ratio.value < 1 else "no gain"
    return f"step time over the baseline's: {ratio.value:.2f} measured, {proven} ({pairs})"


def _is_smaller(variant: Variant, objective: Objective) -> bool:
    if objective == "memory":
        return variant.memory_ratio is not None and variant.memory_ratio < 1 / SAME_MEMORY
    ratio = variant.step_time_ratio
    return ratio is not None and ratio.interval is not None and ratio.interval.high < 1


def _value(variant: Variant, objective: Objective) -> float:
    if objective == "memory":
        assert variant.memory_ratio is not None
        return variant.memory_ratio
    assert variant.step_time_ratio is not None
    return variant.step_time_ratio.value


def _ratio_text(variant: Variant, objective: Objective) -> str:
    """`0.61 of the baseline's step time [0.59, 0.63]`."""
    noun = NOUN[objective]
    if objective == "memory":
        known = variant.memory_ratio is not None
        return f"{variant.memory_ratio:.2f} of the baseline's {noun}" if known else f"no {noun}"
    return f"{ratio_figure(variant.step_time_ratio)} of the baseline's {noun}"


def ratio_figure(ratio: Estimate | None) -> str:
    """`0.61 [0.59, 0.63]`."""
    if ratio is None:
        return "an unknown share"
    if ratio.interval is None:
        return f"{ratio.value:.2f} ({counted(ratio.n, 'pair')}, no interval)"
    return f"{ratio.value:.2f} [{ratio.interval.low:.2f}, {ratio.interval.high:.2f}]"


def _doubts(
    may: Sequence[Variant], best: Variant, others: Sequence[Variant], objective: Objective
) -> list[str]:
    found = []
    if objective == "time" and best.step_time_ratio and best.step_time_ratio.interval:
        high = best.step_time_ratio.interval.high
        for v in may:
            if v is not best and _value(v, objective) < high:
                found.append(f"{v.label} is as fast as {best.label} within the noise{_memory(v)}")
    for v in others:
        undecided = v.verdict.word == "inconclusive" and v.verdict.more_seeds
        counts = objective == "memory" or v.has_own_times
        if undecided and counts and _is_smaller(v, objective):
            seeds, fresh = len(v.runs) + (v.verdict.more_seeds or 0), _fresh_seed(v)
            found.append(
                f"{v.label} needs {_ratio_text(v, objective)}, and its metric is undecided: "
                f"a study with seeds={seeds} first_seed={fresh} would likely settle it"
            )
    return found


def _fresh_seed(variant: Variant) -> int:
    """The first seed after those that were looked at."""
    return 1 + max(run.summary.seed for run in variant.runs)


def _memory(variant: Variant) -> str:
    if variant.memory_ratio is None:
        return ""
    return f", with {variant.memory_ratio:.2f} of the baseline's peak memory"


def screened(
    outcomes: Sequence[Outcome], baseline: str, objective: Objective, pairs: int
) -> dict[str, str]:
    """Variants that cannot win, with why: they failed, or needed more in every one of the pairs.

    Args:
        outcomes: of the trials so far.
        baseline: the variant the others are set against.
        objective: what is to be small.
        pairs: how many pairs it takes.
    """
    found = {
        o.trial.variant: f"seed {o.trial.seed} failed: {o.error}"
        for o in outcomes
        if o.error is not None and o.trial.variant != baseline
    }
    needs: dict[str, dict[int, float]] = {}
    for o in outcomes:
        need = _need(o.summary, objective)
        if o.error is None and need is not None:
            needs.setdefault(o.trial.variant, {})[o.trial.seed] = need
    base = needs.pop(baseline, {})
    for variant, by_seed in needs.items():
        ratios = [need / base[seed] for seed, need in by_seed.items() if seed in base]
        if len(ratios) >= pairs and min(ratios) >= 1:
            figures = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            found.setdefault(
                variant,
                f"screened out after {counted(len(ratios), 'pair')}: {figures} of {baseline}'s "
                f"{NOUN[objective]}",
            )
    return found


def _need(summary: Summary | None, objective: Objective) -> float | None:
    if summary is None:
        return None
    if objective == "memory":
        return summary.memory_bytes.peak
    return summary.step_time_ms.median
