"""Does a mode train: is its loss finite, does it fall, and is its curve that of float32?

*Falls.* The same few batches are visited again and again. The losses of the last third of visits
are subtracted from those of the same batches in the first third; the mean is the fall. It must be
more than its noise: the largest mean that chance makes by Student's t, and how much float32's loss
moves with the first weights, by up to half a unit of bfloat16.

*Curve.* The mode and float32 take the same steps, in pairs: from the run's first weights, and from
weights and inputs that are moved at random by up to half a unit of bfloat16, with other random
numbers (dropout), the same in both. Within a pair this noise cancels, so the difference of the mean
losses is what the mode changes. Over pairs its mean must be zero by Student's t.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from mprun.inspect.check.check_result import Finding
from mprun.inspect.check.checked_mode import CheckedMode
from mprun.precision.nested import all_tensors, map_tensors
from mprun.train.assemble.parts import build_parts
from mprun.train.data import Batch, MicroBatch
from mprun.train.data.random_numbers import seed_all, untouched
from mprun.train.init_from import Weights
from mprun.train.loop import Trainer
from mprun.watch.nonfinite import FpExceptionError, fp_exceptions
from mprun.watch.updates import OWN_SEED, move_weights

# Pairs of curves: at first, and where the mean of these has a chance below `SUSPECT`. A few pairs
# are enough where the mode clearly agrees.
FEW, MANY = 3, 8
SUSPECT = 0.05
BY_NOISE = 0.01  # The chance at which noise passes as a fall
LEVEL = 1e-4  # The chance of an alarm without a cause that a test accepts
# Standard deviations of float32's starts that the mode's difference must exceed: over pairs even a
# rounding of no consequence is significant
SPREADS = 3
SKIPS = 40  # How often a step may be skipped: from 2^16 the loss scale falls to 2^-14 by 30 of them
# How many times as many steps are taken before a loss counts as flat: a small learning rate or a
# warm-up is no fault
LONGER = 4
VISITS = 3  # Of each batch at least: fewer have no thirds
# Half a unit of bfloat16, the 16-bit format with the fewest digits: no mode moves a weight further
COARSEST = torch.finfo(torch.bfloat16).eps / 2


@dataclass(frozen=True)
class MovedWeights(Weights):
    """First weights that are moved at random by up to a share of themselves."""

    inner: Weights
    most: float
    seed: int

    def load_into(self, model: nn.Module) -> None:
        self.inner.load_into(model)
        move_weights([*model.parameters()], self.most, self.seed)


def with_moved_inputs(
    batches: Sequence[Batch], exact: Sequence[Batch], most: float, seed: int
) -> list[Batch]:
    """The batches with inputs that are moved at random by up to a share of themselves.

    A number stays between the whole numbers around it: labels, masks and probabilities stay what
    they are.

    Args:
        batches: in a mode's dtypes.
        exact: the same in float32, of which the inputs are made.
        most: the share.
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def moved(own: MicroBatch, wide: MicroBatch) -> MicroBatch:
        given = iter(all_tensors(wide.inputs))

        def one(x: Tensor) -> Tensor:
            value = next(given)
            if not value.is_floating_point() or value.layout != torch.strided:
                return x
            share = (torch.rand(value.shape, generator=generator) * 2 - 1) * most
            near = value * (1 + share.to(value.device))
            return torch.empty_like(x).copy_(near.clamp(value.floor(), value.ceil()))

        return own._replace(inputs=map_tensors(one, own.inputs))

    return [
        own._replace(parts=tuple(map(moved, own.parts, wide.parts)))
        for own, wide in zip(batches, exact, strict=True)
    ]


class Curve:
    """The losses of a training that can go on; it ends at one that is not finite.

    Args:
        mode: the mode.
        number: of the start: 0 is the run's own, others have moved weights and inputs, and other
            random numbers.
        exact: train in float32 instead.
        most: the share of themselves by which first weights and inputs are moved at most.
        moves_inputs: whether inputs are moved, too.
    """

    def __init__(
        self,
        mode: CheckedMode,
        number: int = 0,
        exact: bool = False,
        most: float = COARSEST,
        moves_inputs: bool = True,
    ) -> None:
        plan = mode.exact if exact else mode.plan
        self._batches = mode.exact_batches if exact else mode.batches
        if number:
            seed = OWN_SEED - number  # other random numbers than the run's own seeds draw
            moved = MovedWeights({}, (), frozenset(), plan.weights, most, seed)
            plan = replace(plan, weights=moved)
            # the same inputs in all pairs would be rounded alike: their few samples move the mean
            if moves_inputs:
                self._batches = with_moved_inputs(self._batches, mode.exact_batches, most, seed)
        self._plan, self._seed = plan, plan.config.seed + number * 2**16  # a seed a step
        with untouched():
            self.trainer = Trainer(build_parts(plan), plan.limits)
        self.losses: list[float] = []
        self.step_s = 0.0
        """Seconds of the last step."""
        if moves_inputs:
            known = mode.shared.setdefault("curves", {})
            known[id(mode.exact if exact else mode.plan), number, number and most] = self.losses

    @property
    def is_finite(self) -> bool:
        """Whether it can go on."""
        return all(map(math.isfinite, self.losses))

    def until(self, steps: int) -> list[float]:
        """The losses of the first steps, or up to one that is not finite."""
        with untouched(), self._plan.backend_flags():
            while len(self.losses) < steps and self.is_finite:
                began = time.monotonic()
                self.losses.append(self.step())
                self.step_s = time.monotonic() - began
        return self.losses[:steps]

    def step(self) -> float:
        """Take the next step, as the loop does; if it is skipped, the loss scale falls: again.

        So a curve has as many updates as float32's.

        Returns:
            The loss; NaN where no loss scale gives finite gradients.
        """
        trainer, number = self.trainer, len(self.losses)
        batch = self._batches[number % len(self._batches)].trained
        trainer.parts.model.train()
        for _ in range(SKIPS):
            seed_all(self._seed + number)
            result = trainer.optimizer_step(batch)
            trainer.step += 1
            loss = float(result.loss)
            if not (result.skipped is not None and bool(result.skipped) and math.isfinite(loss)):
                return loss
        return math.nan


def curve_losses(
    mode: CheckedMode, steps: int, number: int = 0, exact: bool = False, most: float = COARSEST
) -> list[float]:
    """The losses of a curve's first steps; what was computed once is not again."""
    key = id(mode.exact if exact else mode.plan), number, number and most
    losses: list[float] = mode.shared.setdefault("curves", {}).get(key, [])
    is_enough = len(losses) >= steps or not all(map(math.isfinite, losses))
    return losses[:steps] if is_enough else Curve(mode, number, exact, most).until(steps)


def trains(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    own, count = Curve(mode), len(mode.batches)
    own.until(2)  # the first step is slower
    # steps for which all pairs fit into the budget
    affordable = mode.left_s / (2 * FEW * own.step_s)
    steps = int(min(mode.settings.steps, max(VISITS * count, affordable)))
    losses = own.until(steps)
    mode.checks.figures |= {"loss_first": losses[0], "loss_last": losses[-1], "steps": len(losses)}
    floor = _moved_by_roundings(mode)
    for taken in (steps, LONGER * steps):
        losses = own.until(taken)
        if not own.is_finite:
            yield _not_finite(mode, len(losses))
            return
        fall, noise = _fall(losses, count)
        if fall > noise + floor:
            break
        text = f"{losses[0]:.5g} falls by {fall:.1e} in {taken} steps; "
        text += f"its noise is {noise + floor:.1e}"
        if mode.left_s < (LONGER * steps - taken) * own.step_s:
            mode.checks.not_done["trains"] = f"{text}; no time for {LONGER * steps} steps"
            break
    else:
        yield Finding("loss_does_not_fall", "", text)
    if mode.plan is not mode.exact:  # float32 has no other curve
        yield from _other_curve(mode, steps, own.step_s)


def _fall(losses: Sequence[float], count: int) -> tuple[float, float]:
    """How much the losses of the same batches fall, and the most that is noise.

    Args:
        losses: of steps.
        count: batches that they cycle through.
    """
    visits = len(losses) // count
    if visits < VISITS:  # there are more batches than that many steps visit
        return losses[0] - losses[-1], 0.0
    third = visits // 3 * count
    falls = [x - y for x, y in zip(losses, losses[visits * count - third :], strict=False)][:third]
    # twice the chance: only falls count, `by_chance` is two-sided
    return fmean(falls), by_chance(falls, 2 * BY_NOISE) if third > 1 else 0.0


def _moved_by_roundings(mode: CheckedMode) -> float:
    """How much float32's first loss moves with the weights, by up to half a unit of bfloat16.

    A smaller fall is none in any format.
    """
    (own,) = curve_losses(mode, 1, exact=True)
    others = (Curve(mode, n, exact=True, moves_inputs=False).until(1)[0] for n in range(1, FEW))
    return math.sqrt(fmean((x - own) ** 2 for x in others))


def _not_finite(mode: CheckedMode, steps: int) -> Finding:
    """The op that first made a number that is not finite, in the step that shows it."""
    curve = Curve(mode)  # again up to this step: watching every op of all steps would be slow
    curve.until(steps - 1)
    parts = curve.trainer.parts
    text = f"the loss or a gradient of step {steps} is not finite, at any loss scale"
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


def _other_curve(mode: CheckedMode, steps: int, step_s: float) -> Iterator[Finding]:
    """Whether the mean loss differs from float32's by more than roundings move it."""
    differences, exact = list[float](), list[float]()
    for number in range(MANY):
        if number == FEW and abs(fmean(differences)) <= by_chance(differences, SUSPECT):
            return
        if mode.left_s / 2 < 2 * steps * step_s:  # half is for the checks that follow
            text = f"no time for more than {number} of {MANY} starts of {steps} steps"
            mode.checks.not_done["curve"] = text
            break
        own, of_float32 = (curve_losses(mode, steps, number, exact=x) for x in (False, True))
        if not (math.isfinite(own[-1]) and math.isfinite(of_float32[-1])):
            return
        exact.append(fmean(of_float32))
        differences.append(fmean(own) - exact[-1])
    if len(exact) < FEW:  # too few for a standard deviation
        return
    # lower losses count too: they may be a regularization that is lost
    distance = abs(fmean(differences))
    bound = max(by_chance(differences, LEVEL), SPREADS * stdev(exact))
    mode.checks.figures |= {"curve_distance": distance, "curve_bound": bound}
    if distance > bound:
        reference = fmean(exact)
        text = f"its mean loss of {steps} steps is {reference + fmean(differences):.5g}, float32's "
        text += f"{reference:.5g} from the same {len(exact)} starts; roundings move it by at most "
        text += f"{bound:.1e}"
        yield Finding("other_curve", "", text, at=distance / bound if bound else 1.0)


def by_chance(differences: Sequence[float], level: float) -> float:
    """The most by which chance moves the mean of independent differences from 0, at this level."""
    quantile = float(stdtrit(len(differences) - 1, 1 - level / 2))
    return quantile * stdev(differences) / math.sqrt(len(differences))
