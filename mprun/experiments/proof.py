"""Proof of selected casts: short trainings with them and in float32, from the same weights.

A few batches show how large the errors of gradients are at one moment; a training may differ. So
both are trained, in turn, on the same samples, and their metric (accuracy or loss) is
compared in pairs, a pair for each seed, as `mprun compare` does. It is measured on validation data,
several times in the second half of the training, because its value at one step is noisy. The test
set is not used.

A pair starts with the weights of a few float32 steps, and a dynamic loss scale with a value that
was finite there: from drawn weights and 2^16, float16 would skip the first steps until its scale
fits, and the losses would show only that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from torch import Tensor

from mprun.assemble import Plan, build_parts, make_plan
from mprun.compare.comparison import Estimate, Interval, Verdict
from mprun.compare.statistics import ALPHA, estimate, interval
from mprun.compare.verdicts import Criterion, is_fraction, judge, paired_evidence
from mprun.config import Config
from mprun.config.settings import SearchOpsSettings
from mprun.errors import RunFailedError
from mprun.experiments.budget import EndedEarlyError, LimitedParts
from mprun.precision import OpLists, backend_flags
from mprun.records.run_record import Epoch, Metric, number
from mprun.results.search_result import Proof
from mprun.train.callbacks import Callback, StepLine
from mprun.train.loop import Limits, StopRequestedError, Trainer

WARMUP = 3
"""Steps at the start that are not timed."""
EVALUATIONS = 5
"""How often a training is evaluated; the mean counts."""


@dataclass(frozen=True)
class SelectedCasts:
    """The casts to prove."""

    lists: OpLists | None
    """None for the mode's own casts."""
    layers: Mapping[str, str]
    """Modules in another dtype, as in `precision.layers`."""
    loss_scale: float
    """The initial value of a dynamic loss scale."""


@dataclass(frozen=True)
class ProofTraining:
    """One training."""

    value: float
    """The metric; NaN where the training failed."""
    skipped: int
    """Steps that were skipped because a gradient overflowed."""
    step_time_ms: float | None
    """The median; None for emulated arithmetic, or if not timed."""
    failure: str | None
    """Why it ended early."""


class PairedResult(NamedTuple):
    """The differences of paired trainings."""

    difference: Estimate
    """The mean, this minus float32, with its 95 % interval; NaN where a training failed."""
    equivalence: Interval | None
    """The 90 % interval."""
    verdict: Verdict


def prove(
    low: Config,
    float32: Config,
    casts: SelectedCasts,
    settings: SearchOpsSettings,
    seeds: int,
    parts: LimitedParts,
) -> Proof | None:
    """Train with selected casts and in float32; None without a pair.

    Args:
        low: the configuration of the mixed mode.
        float32: the same in fp32.
        casts: what to prove.
        settings: steps of the trainings and of the warm-up, margins, and whether steps are timed.
        seeds: pairs of trainings, with the seeds 0, 1, ... below this.
        parts: is called before each pair, and may end the proof there or in a training.

    Raises:
        RunFailedError: a training in float32 failed.
    """
    trainings: list[ProofTraining] = []
    base: list[ProofTraining] = []
    low = copy.deepcopy(low)
    low.loss_scale.value = low.loss_scale.value or casts.loss_scale
    with suppress(EndedEarlyError):
        for seed in range(seeds):
            parts("proof: pair of trainings", seed, seeds)
            exact = _plan(float32, seed, settings.steps)
            cast = _plan(low, seed, settings.steps)
            cast = replace(cast, op_lists=casts.lists, layers=dict(casts.layers))
            weights = weights_after(exact, settings.warmup_steps)
            pair = [(cast, trainings), (exact, base)]
            for plan, results in pair if seed % 2 else reversed(pair):  # drift affects both alike
                results.append(_train(plan, weights, settings.timed_steps > 0, parts))
            if not math.isfinite(base[-1].value):
                reason = base[-1].failure or f"its {exact.recipe.METRIC[0]} is {base[-1].value}"
                raise RunFailedError(f"nothing can be proved, training in fp32 failed: {reason}")
    pairs = min(len(trainings), len(base))  # one of the last pair may have been interrupted
    if not pairs:
        return None
    trainings, base = trainings[:pairs], base[:pairs]
    name, direction = exact.recipe.METRIC
    metric = Metric(name=name, higher_is_better=direction == "max")
    values, base_values = [x.value for x in trainings], [x.value for x in base]
    is_relative = not is_fraction(metric, (*values, *base_values))
    criterion = Criterion(
        "train" if exact.splits.validation.is_empty else "validation",
        name,
        settings.relative_margin if is_relative else settings.margin,
        is_relative,
        resolution=0.0,
        higher_is_better=metric.higher_is_better,
    )
    difference, equivalence, verdict = compare_trainings(values, base_values, criterion)
    timed = ((a.step_time_ms, b.step_time_ms) for a, b in zip(trainings, base, strict=True))
    time_ratios = [a / b for a, b in timed if a is not None and b is not None]
    return Proof(
        steps=settings.steps,
        split=criterion.split,
        metric=criterion.metric,
        is_relative=is_relative,
        margin=criterion.margin,
        values=values,
        float32_values=base_values,
        skipped_steps=[x.skipped for x in trainings],
        failures=[x.failure for x in trainings],
        difference=difference.value,
        interval=difference.interval,
        equivalence_interval=equivalence,
        verdict=verdict.word,
        reason=verdict.reason,
        more_seeds=verdict.more_seeds,
        step_time_ratio=median(time_ratios) if time_ratios else None,
    )


def compare_trainings(
    values: Sequence[float], base: Sequence[float], criterion: Criterion
) -> PairedResult:
    """Compare metrics in pairs, as `mprun compare` does; equal indices are equal seeds.

    Args:
        values: the metric of the trainings that are judged; NaN where one failed.
        base: the metric of float32, finite.
        criterion: the metric and its margin.
    """
    n, failed = len(base), sum(not math.isfinite(x) for x in values)
    failure = f"{failed} of {n} trainings failed" if failed else ""
    pairs = paired_evidence(dict(enumerate(values)), dict(enumerate(base)), criterion, failure)
    (verdict,) = judge([pairs], criterion.higher_is_better)
    if failed or pairs.sample is None:
        return PairedResult(Estimate(math.nan, None, n), None, verdict)
    equivalence = interval(pairs.sample, 1 - 2 * ALPHA)
    return PairedResult(estimate(pairs.sample), equivalence, verdict)


def weights_after(plan: Plan, steps: int) -> Mapping[str, Tensor]:
    """The model's state after some steps of a plan, without validation.

    It is the state of a model in training; drawn weights are only its start.
    """
    splits = replace(plan.splits, validation=plan.splits.validation.first(0))
    with backend_flags(plan.policy, plan.native_tf32):
        parts = build_parts(replace(plan, splits=splits))
        if steps:
            Trainer(parts, Limits(None, steps, None)).fit()
    state: Mapping[str, Tensor] = parts.model.state_dict()
    return state


def _plan(config: Config, seed: int, steps: int) -> Plan:
    config = copy.deepcopy(config)
    config.seed, config.train.max_steps = seed, steps
    config.train.epochs = config.train.max_time_s = None
    return make_plan(config, ())


def _train(
    plan: Plan, weights: Mapping[str, Tensor], timed: bool, parts: LimitedParts
) -> ProofTraining:
    """One training.

    Raises:
        EndedEarlyError: a signal or the budget ended it.
    """
    observed, values = _ProofCallback(plan.recipe.METRIC[0]), []
    with backend_flags(plan.policy, plan.native_tf32):
        built = build_parts(plan)
        built.model.load_state_dict(weights)
        trainer = Trainer(built, plan.limits, [observed], parts.stop.requested)
        try:
            for stop in _stops(plan.limits.max_steps or 0):
                trainer.limit(replace(plan.limits, max_steps=stop))
                trainer.fit()
                values.append(observed.value)
        except StopRequestedError:
            raise parts.ended() from None
        except RunFailedError as error:
            return ProofTraining(math.nan, observed.skipped, None, str(error))
    times_ms = observed.times_ms[WARMUP:] if timed and plan.execution == "native" else []
    step_time_ms = median(times_ms) if times_ms else None
    return ProofTraining(fmean(values), observed.skipped, step_time_ms, None)


def _stops(steps: int) -> list[int]:
    """The steps after which a training is evaluated: spread over its second half, with the last."""
    half = steps / 2
    return sorted({math.ceil(half + half * (n + 1) / EVALUATIONS) for n in range(EVALUATIONS)})


class _ProofCallback(Callback):
    """Keeps step times, the number of skipped steps, and the metric of the last epoch."""

    def __init__(self, metric: str) -> None:
        self.value = math.nan
        self.skipped = 0
        self.times_ms: list[float] = []
        self._metric = metric

    def on_steps(self, lines: list[StepLine]) -> None:
        self.times_ms += [line.step_time_ms for line in lines if line.timed]
        self.skipped += sum(line.skipped for line in lines)

    def on_epoch_end(self, epoch: Epoch, step: int) -> None:
        held_out = epoch.validation
        scores = held_out if held_out.named else epoch.train
        value = scores.value(self._metric)
        self.value = math.nan if value is None else number(value)
