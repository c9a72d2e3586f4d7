"""Does a mode train: is its loss finite, does it fall, and is its curve that of float32?

*Falls.* The same few batches are visited again and again. A batch's loss at its last third of
visits is subtracted from that at its first third; the mean over batches is the fall. Its noise is
the scatter of the visits around a straight line for each batch, and how much the loss moves if the
first weights move by half a unit of bfloat16: a smaller fall is none in any format. A fall within
its noise takes up to four times as many steps before it is reported, for a small learning rate or
a warm-up is no fault.

*Curve.* The same steps are taken from weights that are moved at random by up to half a unit of the
mode's dtype, with other random numbers (dropout). The mean loss of the last half of the steps has a
spread over these starts, and float32's must lie within their prediction interval by Student's t.
Lower losses count too: they may be a regularization that is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import torch
from scipy.special import stdtrit
from torch import nn

from mprun.assemble.parts import build_parts
from mprun.data.loader_sets import seed_all, untouched
from mprun.inspect.checked_mode import CheckedMode
from mprun.numerics.nonfinite import FpExceptionError, fp_exceptions
from mprun.numerics.updates import OWN_SEED, weights_moved
from mprun.precision.policy import torch_dtype
from mprun.results.check_result import Finding
from mprun.train.init_from import Weights
from mprun.train.loop import Trainer

STARTS = 4
"""Curves of a mode: its own, and those of moved weights."""
LEVEL = 1e-4
"""The chance of an alarm without a cause that a test accepts."""
SKIPS = 40
"""How often a step may be skipped: from 2^16 the loss scale falls to 2^-14 by 30 of them."""
LONGER = 4
"""How many times as many steps are taken before a loss counts as flat."""
COARSEST = torch.finfo(torch.bfloat16).eps / 2


@dataclass(frozen=True)
class MovedWeights(Weights):
    """First weights that are moved at random by up to a share of themselves."""

    inner: Weights
    most: float
    number: int

    def load_into(self, model: nn.Module) -> None:
        self.inner.load_into(model)
        parameters = [p for p in model.parameters() if p.is_floating_point()]
        with weights_moved(parameters, self.most, OWN_SEED - self.number):
            moved = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, value in zip(parameters, moved, strict=True):
                p.copy_(value)


class Curve:
    """The losses of a training that can go on.

    Args:
        mode: the mode.
        exact: train in float32 instead.
        moved: the share of themselves by which the first weights are moved at most.
        number: of the random numbers.
    """

    def __init__(
        self, mode: CheckedMode, exact: bool = False, moved: float = 0.0, number: int = 0
    ) -> None:
        plan = mode.exact if exact else mode.plan
        if moved:
            weights = MovedWeights({}, (), frozenset(), plan.weights, moved, number)
            plan = replace(plan, weights=weights)
        self._plan, self._seed = plan, plan.config.seed + number * 2**16
        self._batches = mode.exact_batches if exact else mode.batches
        with untouched():
            self.trainer = Trainer(build_parts(plan), plan.limits)
        self.losses: list[float] = []
        self.is_stuck = False
        """Whether the loss scale cannot work: one step was skipped again and again."""

    def until(self, steps: int) -> list[float]:
        """The losses of the first steps; it ends at one that is not finite."""
        with untouched(), self._plan.backend_flags():
            while len(self.losses) < steps and not self.is_stuck:
                self.step()
                self.is_stuck |= not math.isfinite(self.losses[-1])
        return self.losses

    def step(self) -> None:
        """Take the next step, as the loop does; if it is skipped, the loss scale falls: again.

        So a curve has as many updates as float32's.
        """
        trainer, number = self.trainer, len(self.losses)
        batch = self._batches[number % len(self._batches)].trained
        trainer.parts.model.train()
        for _ in range(SKIPS):
            seed_all(self._seed + number)
            result = trainer.optimizer_step(batch)
            trainer.step += 1
            if not (result.skipped is not None and bool(result.skipped)):
                break
            if not math.isfinite(float(result.loss)):
                break
        else:
            self.is_stuck = True
        self.losses.append(float(result.loss))


def trains(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    steps, own, count = mode.settings.steps, Curve(mode), len(mode.batches)
    floor = math.nan
    for taken in (steps, LONGER * steps):
        losses = list(own.until(taken))
        if taken == steps:
            mode.checks.figures |= {"loss_first": losses[0], "loss_last": losses[-1]}
        if own.is_stuck:
            yield _not_finite(mode, losses)
            return
        floor = _moved_by_roundings(mode, losses[0]) if taken == steps else floor
        fall, noise = _fall(losses, count)
        if fall > noise + floor:
            break
    else:
        text = f"{losses[0]:.5g} falls by {fall:.1e} in {len(losses)} steps; "
        yield Finding("loss_does_not_fall", "", f"{text}its noise is {noise + floor:.1e}")
    losses = losses[:steps]
    yield from _other_curve(mode, losses)


def _fall(losses: list[float], count: int) -> tuple[float, float]:
    """How much the losses of the same batches fall, and the most that is noise.

    Args:
        losses: of steps.
        count: batches that they cycle through.
    """
    visits = len(losses) // count
    if visits < 3:  # the data have more batches than that many steps visit
        return losses[0] - losses[-1], 0.0
    rows = torch.tensor(losses[: visits * count], dtype=torch.float64).view(visits, count)
    third = visits // 3
    fall = float((rows[:third].mean(0) - rows[-third:].mean(0)).mean())
    at = torch.arange(visits, dtype=torch.float64)[:, None] - (visits - 1) / 2
    centred = rows - rows.mean(0)
    left = centred - at * (at * centred).sum(0) / (at * at).sum()
    freedom = count * (visits - 2)
    error = math.sqrt(float(left.square().sum()) / freedom * 2 / (third * count))
    return fall, float(stdtrit(freedom, 0.99)) * error


def _moved_by_roundings(mode: CheckedMode, loss: float) -> float:
    """How much the first loss moves with the weights, by up to half a unit of bfloat16."""
    others = [Curve(mode, moved=COARSEST, number=n).until(1)[0] for n in range(1, STARTS)]
    return math.sqrt(fmean((x - loss) ** 2 for x in others if math.isfinite(x)))


def _not_finite(mode: CheckedMode, losses: list[float]) -> Finding:
    """The op that first made a number that is not finite, in the step that shows it."""
    curve, steps = Curve(mode), len(losses)
    curve.until(steps - 1)
    parts = curve.trainer.parts
    what = "a gradient" if math.isfinite(losses[-1]) else "the loss"
    text = f"{what} of step {steps} is not finite, at any loss scale"
    try:
        with untouched(), fp_exceptions(parts.model, parts.optimizer, "halt", halt_after=1):
            curve.step()
    except FpExceptionError as error:
        report = error.report
        all_of_step = [*report.findings, *report.expected, *report.of("absorbed")]
        first = next((x for x in all_of_step if x.phase == "forward"), error.exception)
        if first is not None:
            return Finding("not_finite", first.module, text, first.op, first.location or "")
    return Finding("not_finite", "", text)


def _other_curve(mode: CheckedMode, own: list[float]) -> Iterator[Finding]:
    """Whether float32's losses are outside of what starts that differ by roundings give."""
    steps = len(own)
    exact: list[float] = mode.shared.setdefault("curve", Curve(mode, exact=True)).until(steps)
    if exact == own or len(exact) < steps:
        return
    unit = torch.finfo(torch_dtype(mode.plan.policy.compute_dtype)).eps / 2
    moved = [Curve(mode, moved=unit, number=n).until(steps) for n in range(1, STARTS)]
    means = [fmean(x[steps // 2 :]) for x in (own, *moved) if len(x) == steps]
    reference = fmean(exact[steps // 2 :])
    if len(means) < STARTS or not all(map(math.isfinite, means)):
        return
    distance = fmean(means) - reference
    quantile = float(stdtrit(STARTS - 1, 1 - LEVEL / 2))
    bound = quantile * stdev(means) * math.sqrt(1 + 1 / STARTS)
    mode.checks.figures |= {"curve_distance": distance, "curve_bound": bound}
    if abs(distance) > bound:
        text = f"its mean loss in steps {steps // 2 + 1} to {steps} is {fmean(means):.5g}, "
        text += f"float32's {reference:.5g}; other starts explain {bound:.1e}"
        yield Finding("other_curve", "", text, at=abs(distance) / bound if bound else 1.0)
