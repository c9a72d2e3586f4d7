"""Time and samples to equal quality: what two variants need to reach one validation loss.

A mode that is 1.2 times as fast per step and needs 1.2 times the steps buys nothing. So each pair
of runs with equal seed gets a validation loss that both reached:

    best(r)    the lowest validation loss of run r
    target     max(best(variant), best(baseline)) + tolerance |best(baseline)|
    steps(r)   where "the lowest loss so far" first falls to the target, linear between validations
    samples    steps x samples per step (skipped steps count); time: samples / samples per second

Without a true difference both ratios are equally likely above and below 1, so the t interval of
their logarithms has its level. Noise as large as the tolerance pulls ratios towards 1 (by 2 % for a
true ratio of 1.2 and 2 % noise; simulated), as the lowest loss so far is a lucky one. A variant
whose best loss lies beyond the tolerance `missed`: its ratio is of the level that it did reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from mprun.errors import UsageError
from mprun.records.console.formatting import counted
from mprun.records.run_folder import ValidationLoss, read_validation_losses
from mprun.records.run_record import Summary
from mprun.study.compare.comparison import EqualQuality, Estimate, QualityWord, Variant
from mprun.study.compare.load import RunGroup
from mprun.study.compare.statistics import geometric_mean
from mprun.study.compare.times import SAME, TimedPairs, judge_ratio

MIN_VALIDATIONS = 4  # Fewer points are no curve: a step between them would be a guess

Curve = Sequence[ValidationLoss]
_Need = tuple[float | None, float | None, Estimate | None]
NOTHING: _Need = (None, None, None)


class StepsToTarget(NamedTuple):
    """What the two runs of a pair need."""

    ours: float  # Steps of the variant to the target
    theirs: float  # Steps of the baseline to the target
    is_missed: bool
    """Whether the variant never came within the tolerance of the baseline's best loss."""


def steps_to_target(ours: Curve, theirs: Curve, tolerance: float) -> StepsToTarget | None:
    """The steps in which two runs reach one validation loss.

    Losses that are not finite do not count; `tolerance` is the share of the baseline's best loss
    that does not matter. None if a run had fewer than `MIN_VALIDATIONS`, or was at the target by
    its first.
    """
    ours, theirs = ([row for row in curve if math.isfinite(row.loss)] for curve in (ours, theirs))
    if min(len(ours), len(theirs)) < MIN_VALIDATIONS:
        return None
    best, base_best = (min(row.loss for row in curve) for curve in (ours, theirs))
    # The tolerance moves the target from the flat end of a curve, where noise decides on the step,
    # to its slope
    width = tolerance * abs(base_best)
    # The worse of both bests: the baseline's alone would be a lucky draw that the other must repeat
    target = max(best, base_best) + width
    own, base = _crossing(ours, target), _crossing(theirs, target)
    if own is None or base is None:
        return None
    return StepsToTarget(own, base, best > base_best + width)


def _crossing(curve: Curve, target: float) -> float | None:
    """The step at which the lowest loss so far is the target; None if the first one is below it.

    The curve reaches the target.
    """
    before = curve[0]
    if before.loss <= target:  # it got there before, nobody knows when
        return None
    for row in curve[1:]:
        if row.loss <= target:
            share = (before.loss - target) / (before.loss - row.loss)
            return before.step + share * (row.step - before.step)
        # The lowest loss so far, so that a curve that rises for a while crosses once
        before = ValidationLoss(row.step, min(row.loss, before.loss))
    return None


def equal_quality(
    group: RunGroup,
    base: RunGroup,
    tolerance: float,
    timed: TimedPairs,
    curve_of: Callable[[Path], Curve],
) -> EqualQuality | None:
    """What a variant needs to reach the baseline's validation loss; None without a validated pair.

    `timed` are the pairs whose times are compared; `curve_of` is `read_curve`, or one that caches.
    """
    theirs = {run.summary.seed: run for run in base.completed}
    pairs = [
        (run, other)
        for run in group.completed
        if (other := theirs.get(run.summary.seed)) is not None
        and _validations(run.summary)
        and _validations(other.summary)
    ]
    if not pairs:
        return None
    # From the summaries, to name the remedy without reading every log
    fewest = min(_validations(run.summary) for pair in pairs for run in pair)
    if fewest < MIN_VALIDATIONS:
        reason = (
            f"{counted(fewest, 'validation')} in a run, {MIN_VALIDATIONS} are needed: "
            f"train.validations={MIN_VALIDATIONS} or more"
        )
        return EqualQuality(*NOTHING, *NOTHING, 0, tolerance, reason)
    reached = [
        (own.summary, other.summary, steps)
        for own, other in pairs
        if (steps := steps_to_target(curve_of(own.path), curve_of(other.path), tolerance))
        is not None
    ]
    lost = len(pairs) - len(reached)
    reason = (
        f"{lost} of {counted(len(pairs), 'pair')} without a figure: metrics.jsonl has fewer than "
        f"{MIN_VALIDATIONS} finite validation losses, or a run was within "
        f"{100 * tolerance:.3g} % of the loss by its first validation; shorter epochs or a smaller "
        "compare.relative_margin show when it got there"
        if lost
        else ""
    )
    if not reached:
        return EqualQuality(*NOTHING, *NOTHING, 0, tolerance, reason)
    samples = [
        # Skipped steps count: they take time and data. A damaged record may have a batch of 0.
        (steps.ours * max(1, own.batch_size), steps.theirs * max(1, other.batch_size))
        for own, other, steps in reached
    ]
    with_times = {id(own) for own, _ in timed.pairs}
    seconds = [
        # Training alone: the rate leaves out evaluation, which differs with settings, not modes
        (ours / own.samples_per_second, theirs / other.samples_per_second)
        for (own, other, _), (ours, theirs) in zip(reached, samples, strict=True)
        if id(own) in with_times and own.samples_per_second and other.samples_per_second
    ]
    ours_s, theirs_s, time_ratio = _need(seconds)
    if time_ratio is not None and timed.no_verdict:
        time_ratio = time_ratio._replace(interval=None)
    # Counted, not left out: that would leave the good seeds only
    missed = sum(steps.is_missed for _, _, steps in reached)
    return EqualQuality(*_need(samples), ours_s, theirs_s, time_ratio, missed, tolerance, reason)


def _validations(summary: Summary) -> int:
    """Validations of the whole set; in an earlier version's record of at most 500 epochs."""
    if summary.validations is not None:
        return summary.validations
    rows = (epoch.validation for epoch in summary.history)
    return sum(row.loss is not None and row.samples is None for row in rows)


def read_curve(run: Path) -> Curve:
    """The validations of a run's folder; none where the file is missing or damaged."""
    try:
        return read_validation_losses(run)
    except (FileNotFoundError, UsageError):
        return ()


def _need(rows: Sequence[tuple[float, float]]) -> _Need:
    """Medians of what both needed, and the ratio; without pairs, nothing."""
    if not rows:
        return NOTHING
    ratio = geometric_mean([ours / theirs for ours, theirs in rows])
    return median(ours for ours, _ in rows), median(theirs for _, theirs in rows), ratio


def judge_equal_quality(variant: Variant) -> QualityWord | None:
    """Whether a variant gets to the baseline's validation loss sooner; None without a time ratio.

    Returns:
        faster: the interval of the time ratio lies below 1, and no pair missed the loss.
        nothing: it lies above 1 / `SAME`, so a gain of 5 % or more is excluded.
        open: neither.
    """
    quality = variant.equal_quality
    if quality is None or quality.time_ratio is None:
        return None
    around = quality.time_ratio.interval
    if around is None:
        return "open"
    if judge_ratio(quality.time_ratio).word == "lower":
        return "open" if quality.missed else "faster"
    return "nothing" if around.low > 1 / SAME else "open"


def is_faster_per_sample(variant: Variant) -> bool:
    """Whether its samples per second are shown to be more than the baseline's."""
    ratio = variant.throughput_ratio
    return ratio is not None and judge_ratio(ratio).word == "higher"


def buys_nothing(variant: Variant) -> bool:
    """Whether it is faster per sample, and not faster to equal quality."""
    return is_faster_per_sample(variant) and judge_equal_quality(variant) == "nothing"
