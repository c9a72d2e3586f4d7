"""Is a doubled batch worth it? A decision from a comparison of the base batch with twice its size.

Half-size tensors leave room for twice the batch. More samples per step use wide hardware better.
But an epoch then has half the steps, which may cost accuracy unless the learning rate grows. So
three learning rates are compared (times 1, the square root of 2, and 2), after equal epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mprun.assemble import DataCache, make_plan
from mprun.compare.comparison import Comparison, Variant
from mprun.config import Composed, compose
from mprun.config.study_request import StudyRequest
from mprun.errors import UsageError
from mprun.experiments.advise import ratio_figure
from mprun.experiments.study import Study, held_out, new_study

Answer = Literal["double it", "don't", "inconclusive"]

RULES = ("none", "linear", "sqrt")
"""The learning rate is multiplied by 1, 2, or the square root of 2."""


def new_double_study(request: StudyRequest) -> Study:
    """The base batch, and twice its size with each learning-rate rule.

    Raises:
        UsageError: anything wrong with the overrides or the folder, or too few samples.
    """
    overrides, config_dir, load = request.overrides, request.config_dir, DataCache()
    for text in overrides:
        if text.lstrip("+").startswith("batch"):
            raise UsageError(
                f"'{text}': mprun double sets the batch itself; train.batch_size is its base"
            )
    composed = compose([*overrides, "batch=double"], config_dir)
    _check_length(composed)
    planned = make_plan(composed.config, composed.given, load=load)
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
    return new_study(request, listed, of_trials=of_trials, load=load)


def _check_length(composed: Composed) -> None:
    train = composed.config.train
    limits = {"train.max_steps": train.max_steps, "train.max_time_s": train.max_time_s}
    wrong = [f"{key}={value}" for key, value in limits.items() if value is not None]
    if train.epochs is None:
        wrong.append("train.epochs=null")
    if wrong:
        raise UsageError(
            f"{wrong[0]}: mprun double compares after equal epochs; legal: train.epochs=N with "
            "train.max_steps=null and train.max_time_s=null"
        )


@dataclass(frozen=True)
class Doubling:
    """The answer, and why."""

    answer: Answer
    reason: str
    label: str | None
    """The variant to take if the answer is to double."""


def double(comparison: Comparison) -> Doubling:
    """The decision between the base batch (the baseline) and the doubled ones."""
    doubled = comparison.variants[1:]
    good = [v for v in doubled if v.verdict.word in ("equivalent", "better")]
    faster = [v for v in good if _throughput(v, "low") > 1]
    if faster:
        best = _best(faster, comparison.higher_is_better)
        return Doubling(
            "double it",
            f"{best.label}: {ratio_figure(best.throughput_ratio)} of the base batch's samples per "
            f"second, {comparison.metric} {best.verdict.word}",
            best.label,
        )
    if not doubled:
        return Doubling("inconclusive", "no run with the doubled batch was completed", None)
    against = []
    if all(_throughput(v, "high") <= 1 for v in doubled):
        figures = ratio_figure(max(doubled, key=lambda v: _throughput(v, "high")).throughput_ratio)
        against.append(f"it is no faster: {figures} of the base batch's samples per second")
    if all(v.verdict.word == "worse" for v in doubled):
        against.append(f"{comparison.metric} is worse with every learning-rate rule")
    if against:
        return Doubling("don't", "; ".join(against), None)
    if any(v.execution == "emulated" for v in comparison.variants):
        return Doubling(
            "inconclusive", "the runs are emulated: their times do not describe this hardware", None
        )
    if all(v.throughput_ratio is None for v in doubled):
        return Doubling("inconclusive", "no step was timed, the runs are too short", None)
    figures_of = (
        f"{v.label}: {ratio_figure(v.throughput_ratio)} of the samples per second, "
        f"metric {v.verdict}"
        for v in doubled
    )
    return Doubling("inconclusive", "; ".join(figures_of), None)


def _throughput(variant: Variant, end: Literal["low", "high"]) -> float:
    """An end of the throughput ratio's interval; without one, 1 for low, infinity for high."""
    ratio = variant.throughput_ratio
    if ratio is None or ratio.interval is None:
        return 1.0 if end == "low" else float("inf")
    return ratio.interval.low if end == "low" else ratio.interval.high


def _best(variants: Sequence[Variant], higher_is_better: bool) -> Variant:
    def score(variant: Variant) -> float:
        assert variant.metric is not None
        return variant.metric.value if higher_is_better else -variant.metric.value

    return max(variants, key=score)
