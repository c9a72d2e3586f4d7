"""Proof of a choice of ops: short trainings with it and in float32, from the same weights.

What a few batches say of the gradients of one moment is no promise for a training. So both are
trained, in turn, over the same samples, and what they are judged by (accuracy or loss) is compared
in pairs, a pair for each seed. It is measured on validation data, a few times in the second half of
the training, as its value at one step is noisy. The test set is not looked at.

A pair begins with the weights of a few float32 steps, and a dynamic loss scale with what was found
to be finite there: from drawn weights and 2^16, float16 would skip the first steps until its scale
fits, and the losses would tell of that alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from torch import Tensor

from mprun.assemble import Plan, build_parts, plan
from mprun.config import Config
from mprun.errors import RunFailedError
from mprun.experiments.paired import Metric, Paired, compare
from mprun.experiments.warmup import weights_after
from mprun.precision import OpLists, backend_flags
from mprun.records.run_record import Epoch, number
from mprun.train.callbacks import NoObserver, StepLine
from mprun.train.loop import Trainer

WARMUP = 3
"""Steps at the start that are not timed."""
EVALUATIONS = 5
"""How often a training is judged; the mean counts."""


@dataclass(frozen=True)
class Choice:
    """What is to be proved."""

    lists: OpLists
    layers: Mapping[str, str]
    """Modules apart, as `precision.layers` has them."""
    loss_scale: float
    """What a dynamic loss scale begins with."""


class Margins(NamedTuple):
    """Differences inside plus and minus these do not matter."""

    accuracy: float
    loss: float
    """A share of float32's."""

    def metric(self, name: str) -> Metric:
        """The metric of that name, with its margin."""
        if name == "accuracy":
            return Metric(name, True, False, self.accuracy)
        return Metric(name, False, True, self.loss)


@dataclass(frozen=True)
class Arm:
    """One training."""

    value: float
    """Of the metric; NaN where the training failed."""
    skipped: int
    """Steps that were not taken because a gradient overflowed."""
    step_time_ms: float | None
    """Median; None of emulated arithmetic, or where none were kept."""
    failure: str | None
    """Why it ended early."""


@dataclass(frozen=True)
class Proof:
    """Trainings in pairs."""

    steps: int
    split: str
    """Which samples the metric is of: validation, or train where nothing is held out."""
    found: tuple[Arm, ...]
    """By seed: 0, 1, ..."""
    float32: tuple[Arm, ...]
    metric: Metric
    paired: Paired

    @property
    def step_time_ratio(self) -> float | None:
        """Step time over float32's, the median over seeds."""
        pairs = zip(self.found, self.float32, strict=True)
        timed = ((a.step_time_ms, b.step_time_ms) for a, b in pairs)
        ratios = [a / b for a, b in timed if a is not None and b is not None]
        return median(ratios) if ratios else None


def prove(
    low: Config,
    float32: Config,
    choice: Choice,
    *,
    seeds: int,
    warmup_steps: int,
    steps: int,
    margins: Margins,
    timed: bool,
    told: Callable[[str], None],
) -> Proof:
    """Train with a choice of ops and in float32.

    Args:
        low: the configuration of the mixed mode.
        float32: the same in fp32.
        choice: what is to be proved.
        seeds: pairs of trainings, with the seeds 0, 1, ... below this.
        warmup_steps: float32 steps that both begin behind.
        steps: optimizer steps of each.
        margins: differences that do not matter.
        timed: whether step times are kept.
        told: is told what is trained next.

    Raises:
        RunFailedError: a training in float32 failed.
    """
    found: list[Arm] = []
    base: list[Arm] = []
    low = copy.deepcopy(low)
    low.loss_scale.value = low.loss_scale.value or choice.loss_scale
    for seed in range(seeds):
        exact = _planned(float32, seed, steps)
        chosen = _planned(low, seed, steps)
        chosen = replace(chosen, op_lists=choice.lists, layers=dict(choice.layers))
        told(f"training in fp32 with seed {seed}, to begin with")
        weights = weights_after(exact, warmup_steps)
        pair = [(chosen, found), (exact, base)]
        for planned, arms in pair if seed % 2 else reversed(pair):  # so that drift hurts both
            told(f"training in {planned.policy.name} with seed {seed}")
            arms.append(_trained(planned, weights, timed))
        if not math.isfinite(base[-1].value):
            reason = base[-1].failure or f"its {exact.recipe.metric} is {base[-1].value}"
            raise RunFailedError(f"nothing can be proved, training in fp32 failed: {reason}")
    metric = margins.metric(exact.recipe.metric)
    paired = compare([x.value for x in found], [x.value for x in base], metric)
    split = "validation" if len(exact.splits.validation) else "train"
    return Proof(steps, split, tuple(found), tuple(base), metric, paired)


def _planned(config: Config, seed: int, steps: int) -> Plan:
    config = copy.deepcopy(config)
    config.seed, config.train.max_steps = seed, steps
    config.train.epochs = config.train.max_time_s = None
    return plan(config, ())


def _trained(chosen: Plan, weights: Mapping[str, Tensor], timed: bool) -> Arm:
    kept, values = _Kept(chosen.recipe.metric), []
    with backend_flags(chosen.policy, chosen.native_tf32):
        parts = build_parts(chosen)
        parts.model.load_state_dict(weights)
        trainer = Trainer(parts, chosen.limits, kept, lambda: False)
        try:
            for stop in _stops(chosen.limits.max_steps or 0):
                trainer.limit(replace(chosen.limits, max_steps=stop))
                trainer.fit()
                values.append(kept.value)
        except RunFailedError as error:
            return Arm(math.nan, kept.skipped, None, str(error))
    times_ms = kept.times_ms[WARMUP:] if timed and chosen.execution == "native" else []
    return Arm(fmean(values), kept.skipped, median(times_ms) if times_ms else None, None)


def _stops(steps: int) -> list[int]:
    """The steps behind which a training is judged: spread over its second half, the last of all."""
    half = steps / 2
    return sorted({math.ceil(half + half * (n + 1) / EVALUATIONS) for n in range(EVALUATIONS)})


class _Kept(NoObserver):
    """Keeps the times of steps, how many were skipped, and the metric of the last epoch."""

    def __init__(self, metric: str) -> None:
        self.value = math.nan
        self.skipped = 0
        self.times_ms: list[float] = []
        self._metric = metric

    def steps(self, lines: list[StepLine]) -> None:
        self.times_ms += [line.step_time_ms for line in lines if line.timed]
        self.skipped += sum(line.skipped for line in lines)

    def epoch(self, epoch: Epoch) -> None:
        held_out = epoch.validation
        scores = epoch.train if held_out.loss is None else held_out
        value = scores.accuracy if self._metric == "accuracy" else scores.loss
        self.value = math.nan if value is None else number(value)
