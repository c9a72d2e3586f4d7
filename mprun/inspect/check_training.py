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
        self.skipped: list[bool] = []

    def until(self, steps: int) -> list[float]:
        """The losses of the first steps; it ends at one that is not finite."""
        with untouched(), self._plan.backend_flags():
            while len(self.losses) < steps and all(map(math.isfinite, self.losses)):
                self.step()
        return self.losses

    def step(self) -> None:
        """Take the next step, as the loop does."""
        trainer, number = self.trainer, len(self.losses)
        seed_all(self._seed + number)
        trainer.parts.model.train()
        result = trainer.optimizer_step(self._batches[number % len(self._batches)].trained)
        trainer.step += 1
        self.losses.append(float(result.loss))
        self.skipped.append(result.skipped is not None and bool(result.skipped))


def trains(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    steps, own = mode.settings.steps, Curve(mode)
    losses = list(own.until(steps))
    mode.checks.figures |= {"loss_first": losses[0], "loss_last": losses[-1]}
    if not math.isfinite(losses[-1]):
        yield _not_finite(mode, len(losses))
        return
    floor = _moved_by_roundings(mode, losses[0])
    count = len(mode.batches)
    if not _falls(losses, count, floor):
        longer = own.until(LONGER * steps)
        if not math.isfinite(longer[-1]):
            yield _not_finite(mode, len(longer))
            return
        if all(own.skipped):
            text = f"all of {len(longer)} steps were skipped: no loss scale gives finite gradients"
            yield Finding("not_finite", "", text)
        elif not _falls(longer, count, floor):
            fall, noise = _fall(longer, count)
            text = f"{longer[0]:.5g} falls by {fall:.1e} in {len(longer)} steps; "
            yield Finding("loss_does_not_fall", "", f"{text}its noise is {noise + floor:.1e}")
    yield from _other_curve(mode, losses)


def _falls(losses: list[float], count: int, floor: float) -> bool:
    fall, noise = _fall(losses, count)
    return fall > noise + floor


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


def _not_finite(mode: CheckedMode, steps: int) -> Finding:
    """The op that first made a number that is not finite, in the step that shows it."""
    curve = Curve(mode)
    curve.until(steps - 1)
    parts = curve.trainer.parts
    text = f"the loss is {{}} in step {steps}"
    try:
        with untouched(), fp_exceptions(parts.model, parts.optimizer, "halt", halt_after=1):
            curve.step()
    except FpExceptionError as error:
        report = error.report
        all_of_step = [*report.findings, *report.expected, *report.of("absorbed")]
        found = next((x for x in all_of_step if x.phase == "forward"), error.exception)
        if found is not None:
            where = found.location or ""
            return Finding("not_finite", found.module, text.format("lost"), found.op, where)
    return Finding("not_finite", "", text.format(curve.losses[-1] if curve.losses else "lost"))


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
