"""Is a doubled batch worth it? A decision from a comparison of the base batch with twice its size.

Half-size tensors leave room for twice the batch. More samples per step use wide hardware better.
But an epoch then has half the steps, which may cost accuracy unless the learning rate grows. So
three learning rates are compared (times 1, the square root of 2, and 2), after equal epochs.

`largest_size` searches the largest batch whose peak memory fits, for `mprun memory`, which counts
the peak of a step on fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from mprun.config import compose
from mprun.config.settings import StudyRequest
from mprun.errors import UsageError
from mprun.study.advise import ratio_figure
from mprun.study.compare.comparison import KEEPS, Comparison, Variant
from mprun.study.study import Study, held_out, new_study, scored_more
from mprun.train.assemble import DataCache, make_plan

Answer = Literal["double it", "don't", "inconclusive"]

# The learning rate is multiplied by 1, by 2 (Goyal et al. 2017), or by the square root of 2
# (Krizhevsky 2014: the variance of an update stays equal)
RULES = ("none", "linear", "sqrt")


def new_double_study(request: StudyRequest) -> Study:
    """The base batch, and twice its size with each learning-rate rule."""
    overrides, config_dir, load = request.overrides, request.config_dir, DataCache()
    for text in overrides:
        if text.lstrip("+").startswith("batch"):
            raise UsageError(
                f"{text!r}: mprun double sets the batch itself; train.batch_size is its base"
            )
    composed = compose([*overrides, "batch=double"], config_dir)
    train = composed.config.train
    limits = {"train.max_steps": train.max_steps, "train.max_time_s": train.max_time_s}
    wrong = [f"{key}={value}" for key, value in limits.items() if value is not None]
    wrong += ["train.epochs=null"] if train.epochs is None else []
    if wrong:
        raise UsageError(
            f"{wrong[0]}: mprun double compares after equal epochs; legal: train.epochs=N with "
            "train.max_steps=null and train.max_time_s=null"
        )
    planned = make_plan(composed.config, composed.given, load=load)
    # `samples` is None for a stream, which has any number
    samples, doubled = planned.splits.train.samples, planned.batch.effective
    if samples is not None and doubled > samples:
        raise UsageError(
            f"the training set has {samples} samples, less than a batch of {doubled}; legal: "
            f"train.batch_size up to {samples // 2}"
        )
    listed = {"base": [*overrides, "batch=base"]} | {
        f"double-{rule}": [*overrides, "batch=double", f"batch.lr_rule={rule}"] for rule in RULES
    }
    of_trials = held_out(composed, load)
    trial = compose([*overrides, "batch=double", *of_trials], config_dir)
    of_trials += scored_more(trial, load)
    return new_study(request, listed, of_trials=of_trials, load=load)


@dataclass(frozen=True)
class Doubling:
    """The answer, and why."""

    answer: Answer
    reason: str


def double(comparison: Comparison) -> Doubling:
    """The decision between the base batch (the baseline) and the doubled ones."""
    doubled, sign = comparison.variants[1:], 1 if comparison.higher_is_better else -1
    faster = [v for v in doubled if v.verdict.word in KEEPS and _throughput(v, "low") > 1]
    if faster:
        best = max(faster, key=lambda v: sign * v.metric.value if v.metric else -math.inf)
        return Doubling(
            "double it",
            f"{best.label}: {ratio_figure(best.throughput_ratio)} of the base batch's samples per "
            f"second, {comparison.metric} {best.verdict.word}",
        )
    if not doubled:
        return Doubling("inconclusive", "no run with the doubled batch was completed")
    against = []
    if all(_throughput(v, "high") <= 1 for v in doubled):
        figures = ratio_figure(max(doubled, key=lambda v: _throughput(v, "high")).throughput_ratio)
        against.append(f"it is no faster: {figures} of the base batch's samples per second")
    if all(v.verdict.word == "worse" for v in doubled):
        against.append(f"{comparison.metric} is worse with every learning-rate rule")
    if against:
        return Doubling("don't", "; ".join(against))
    if any(v.execution == "emulated" for v in comparison.variants):
        return Doubling(
            "inconclusive", "the runs are emulated: their times do not describe this hardware"
        )
    if all(v.throughput_ratio is None for v in doubled):
        return Doubling("inconclusive", "no step was timed, the runs are too short")
    figures_of = (
        f"{v.label}: {ratio_figure(v.throughput_ratio)} of the samples per second, "
        f"metric {v.verdict}"
        for v in doubled
    )
    return Doubling("inconclusive", "; ".join(figures_of))


def _throughput(variant: Variant, end: Literal["low", "high"]) -> float:
    """An end of the throughput ratio's interval; without one, 1 for low, infinity for high."""
    ratio = variant.throughput_ratio
    if ratio is None or ratio.interval is None:
        return 1.0 if end == "low" else math.inf
    return ratio.interval.low if end == "low" else ratio.interval.high


@dataclass(frozen=True)
class LargestSize:
    """The end of a search."""

    size: int  # The largest that fits; 0 if not even 1 does
    tried: Mapping[int, int]  # Size to peak in bytes

    @property
    def grows(self) -> bool:
        """Whether no larger size that was tried took less than a smaller one."""
        peaks = [peak for _, peak in sorted(self.tried.items())]
        return peaks == sorted(peaks)


def largest_size(peak: Callable[[int], int], limit: int, start: int, most: int) -> LargestSize:
    """The largest size, from 1 to `most`, whose peak takes at most `limit` bytes.

    The peak is assumed to grow with the size, see `LargestSize.grows`. `start` is tried first.
    """
    tried: dict[int, int] = {}
    low, high = 0, most + 1  # low fits, high does not
    guess, halve = min(start, most), False
    while high - low > 1:
        gap = high - low
        tried[guess] = peak(guess)
        low, high = (guess, high) if tried[guess] <= limit else (low, guess)
        # The line bends where another moment of the step becomes the peak: a guess that leaves more
        # than half of the interval is followed by a halving, so the search stays logarithmic
        halve = not halve and high in tried and low in tried and 2 * (high - low) > gap
        middle = (low + high) // 2 if high in tried else 2 * low
        # Peaks are almost linear in the batch: parameters and state, plus bytes for each sample
        line = None if halve else _on_line(tried, limit, low, high)
        guess = min(max(middle if line is None else line, low + 1), high - 1)
    return LargestSize(low, tried)


def _on_line(tried: Mapping[int, int], limit: int, low: int, high: int) -> int | None:
    """The size at which the line through two tried sizes reaches `limit`, or None."""
    sizes = sorted(tried)
    if low in tried and high in tried:
        a, b = low, high
    elif len(sizes) > 1:  # all fit, or none: extend the line from the two nearest
        a, b = sizes[-2:] if low in tried else sizes[:2]
    else:
        return None
    rise = tried[b] - tried[a]
    return a + (limit - tried[a]) * (b - a) // rise if rise > 0 else None
