"""Proof of a choice of ops: short trainings with it and in float32, from the same weights.

What a few batches say of the gradients of one moment is no promise for a training. So both are
trained, in turn, over the same samples, and their validation losses compared in pairs, a pair for
each seed. The test set is not looked at.

A pair begins with the weights of a few float32 steps, and a dynamic loss scale with what was found
to be finite there: from drawn weights and 2^16, float16 would skip the first steps until its scale
fits, and the losses would tell of that alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from torch import Tensor

from mprun.build import Plan, build_parts, plan
from mprun.config import Config
from mprun.errors import RunFailedError
from mprun.observer import NoObserver, StepLine
from mprun.precision import OpLists, backend_flags
from mprun.record import Epoch, number
from mprun.runner import Trainer
from mprun.study.paired import Paired, compare
from mprun.study.warmup import weights_after

WARMUP = 3
"""Steps at the start that are not timed."""


@dataclass(frozen=True)
class Choice:
    """What is to be proved."""

    lists: OpLists
    layers: Mapping[str, str]
    """Modules apart, as `precision.layers` has them."""
    loss_scale: float
    """What a dynamic loss scale begins with."""


@dataclass(frozen=True)
class Arm:
    """One training."""

    loss: float
    """Of the validation set, or where there is none the last of training; NaN where it failed."""
    skipped: int
    """Steps that were not taken because a gradient overflowed."""
    step_time_ms: float | None
    """Median; None of emulated arithmetic."""
    failure: str | None
    """Why it ended early."""


@dataclass(frozen=True)
class Proof:
    """Trainings in pairs."""

    steps: int
    split: str
    """Which samples the losses are of: validation, or train where nothing is held out."""
    found: tuple[Arm, ...]
    """By seed: 0, 1, ..."""
    float32: tuple[Arm, ...]
    margin: float
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
    margin: float,
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
        margin: relative differences of the loss inside plus and minus this do not matter.
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
            arms.append(_trained(planned, weights))
        if not math.isfinite(base[-1].loss):
            reason = base[-1].failure or f"the loss is {base[-1].loss}"
            raise RunFailedError(f"nothing can be proved, training in fp32 failed: {reason}")
    paired = compare([x.loss for x in found], [x.loss for x in base], margin)
    split = "validation" if len(exact.splits.validation) else "train"
    return Proof(steps, split, tuple(found), tuple(base), margin, paired)


def _planned(config: Config, seed: int, steps: int) -> Plan:
    config = copy.deepcopy(config)
    config.seed, config.train.max_steps = seed, steps
    config.train.epochs = config.train.max_time_s = None
    return plan(config, ())


def _trained(chosen: Plan, weights: Mapping[str, Tensor]) -> Arm:
    kept = _Kept()
    with backend_flags(chosen.policy, chosen.native_tf32):
        parts = build_parts(chosen)
        parts.model.load_state_dict(weights)
        try:
            Trainer(parts, chosen.limits, kept, lambda: False).fit()
        except RunFailedError as error:
            return Arm(math.nan, kept.skipped, None, str(error))
    native = chosen.execution == "native" and kept.times_ms[WARMUP:]
    return Arm(kept.loss, kept.skipped, median(native) if native else None, None)


class _Kept(NoObserver):
    """Keeps the times of steps, how many were skipped, and the last epoch's loss."""

    def __init__(self) -> None:
        self.loss = math.nan
        self.skipped = 0
        self.times_ms: list[float] = []

    def steps(self, lines: list[StepLine]) -> None:
        self.times_ms += [line.step_time_ms for line in lines if line.timed]
        self.skipped += sum(line.skipped for line in lines)

    def epoch(self, epoch: Epoch) -> None:
        losses = (epoch["validation"]["loss"], epoch["train"]["loss"])
        self.loss = next((number(loss) for loss in losses if loss is not None), math.nan)
