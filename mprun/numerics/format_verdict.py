"""Range or precision: which 16-bit format a tensor, or a whole model, needs.

float16 and bfloat16 spend 15 bits differently: float16 has 11 significand bits and 30 normal
exponents, bfloat16 8 and 254. A model that exceeds float16's exponents needs *range*; one that 8
bits are too few for needs *precision*. Both appear as noise, so one criterion separates them:

    both formats suffice        either
    bfloat16 alone              needs range: bf16
    float16 alone               needs precision: fp16
    neither                     needs fp32

The verdict on a model uses the losses and weight gradients of a forward and backward pass in each
format, and the criterion of `tolerance.py`: a format suffices if the loss and the gradient of the
worst parameter are close enough to float32's, or nearly as close as with weights of the format's
precision alone.

The verdict on one tensor is about rounding its values. Rounding alone rarely leaves less than 50 dB
in bfloat16, but it adds up through a model and grows where numbers cancel. If the passes in a
format are fine, a tensor with a large rounding error does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

from mprun.numerics.rounding_errors import power
from mprun.numerics.sqnr import ratio_db
from mprun.numerics.tolerance import NEEDED_DB, Tolerance, gradient_error, loss_error
from mprun.records.deviation import Deviation

EITHER, FP32 = "either", "needs fp32"
RANGE, PRECISION = "needs range: bf16", "needs precision: fp16"


def range_or_precision(fp16: bool, bf16: bool) -> str:
    """The verdict, from whether each of the two formats suffices."""
    if fp16 and bf16:
        return EITHER
    if bf16:
        return RANGE
    return PRECISION if fp16 else FP32


@dataclass(frozen=True)
class GradientErrors:
    """The errors of some gradients, parameter by parameter."""

    ratios: Mapping[str, float]
    """Parameter to noise power over signal power; infinite where a gradient is not finite."""
    beyond: Mapping[str, float] = field(default_factory=dict)
    """The same of noise beyond the difference between batches (`tolerance.py`)."""

    @property
    def mean(self) -> float:
        """The mean ratio: every parameter counts the same, whatever the size of its gradient."""
        return sum(self.ratios.values()) / len(self.ratios) if self.ratios else 0.0

    @property
    def db(self) -> float:
        """The mean as a signal-to-noise ratio."""
        return ratio_db(1.0, self.mean)

    def db_of(self, name: str) -> float:
        """The signal-to-noise ratio of one parameter."""
        return ratio_db(1.0, self.ratios[name])


def gradient_errors(
    exact: Mapping[str, Tensor],
    low: Mapping[str, Tensor],
    variances: Mapping[str, float] | None = None,
) -> GradientErrors:
    """Compare gradients, in float64.

    Parameters whose exact gradient is 0 are left out, unless the other one is not finite.

    Args:
        exact: parameter to gradient.
        low: gradients of these parameters at least, unscaled.
        variances: parameter to the power of the difference of exact gradients between batches.
    """
    ratios, beyond = {}, {}
    for name, gradient in exact.items():
        true, other = gradient.double(), low[name].double()
        signal, noise = power(true), power(other - true)
        if not math.isfinite(noise):
            ratios[name] = beyond[name] = math.inf
        elif signal:
            variance = 0.0 if variances is None else variances[name]
            product = float((true * other).sum())
            ratios[name] = noise / signal
            beyond[name] = gradient_error(noise, signal, product, variance) / signal
    return GradientErrors(ratios, beyond)


def variances_of_halves(halves: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The variance of a batch's gradients between batches, from gradients of its two halves.

    Args:
        halves: parameter to gradient of the mean loss over each half.
    """
    first, second = halves
    return {name: power(first[name].double() - second[name].double()) / 4 for name in first}


def typical_errors(steps: Iterable[GradientErrors]) -> GradientErrors:
    """The median over steps, parameter by parameter; infinite where any step's is.

    Not the mean: now and then, rounding turns a ReLU on or off that lies at 0, or makes a pooling
    take another of two equal values. The gradients of that step are then off by as much as if a
    sample had been left out, in every format, and would dominate the mean.
    """
    errors = list(steps)

    def typical(rows: list[Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row[name] for row in rows if name in row] for name in names}
        return {n: math.inf if math.inf in x else median(x) for n, x in columns.items()}

    return GradientErrors(typical([x.ratios for x in errors]), typical([x.beyond for x in errors]))


class FormatPasses:
    """How far passes in one format were from float32's, over some steps."""

    def __init__(self) -> None:
        self._steps: list[GradientErrors] = []
        self._change = self._whole = self._squares = 0.0
        self._scale = math.inf

    def add(
        self,
        gradients: GradientErrors,
        loss: float,
        float32: float,
        deviation: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """Add a step.

        Args:
            gradients: the errors of its gradients.
            loss, float32: its loss, and float32's.
            deviation: an estimate of the loss's standard deviation between batches.
            scale: the loss scale of the gradients.
        """
        self._steps.append(gradients)
        self._change += abs(loss - float32)
        self._whole += abs(float32)
        self._squares += deviation**2
        self._scale = min(self._scale, scale)

    def errors(self, unjudged: Collection[str] = ()) -> GradientErrors:
        """The typical errors of parameters; of unjudged ones only those that are not finite."""
        typical = typical_errors(self._steps)
        counted = {n for n, r in typical.ratios.items() if n not in unjudged or r == math.inf}
        ratios, beyond = (
            {n: r for n, r in x.items() if n in counted} for x in (typical.ratios, typical.beyond)
        )
        return GradientErrors(ratios, beyond)

    def measure(self, unjudged: Collection[str] = ()) -> Deviation:
        """Loss and gradients of all steps against float32's."""
        errors = self.errors(unjudged)
        worst_db, worst = _worst(errors.ratios)
        beyond_db, where = _worst(errors.beyond)
        deviation = math.sqrt(len(self._steps) * self._squares)  # the root mean square, each step
        loss, beyond = (
            0.0 if x == 0 else x / self._whole if self._whole else math.inf
            for x in (self._change, loss_error(self._change, self._whole, deviation))
        )
        return Deviation(
            loss, errors.db, worst_db, worst, self._scale, "", beyond, beyond_db, where
        )


def _worst(ratios: Mapping[str, float]) -> tuple[float, str]:
    """The lowest signal-to-noise ratio in dB, and the parameter that has it."""
    name = max(ratios, key=lambda name: ratios[name], default="")
    return (ratio_db(1.0, ratios[name]), name) if name else (math.inf, "")


@dataclass(frozen=True)
class FormatVerdict:
    """Whether a format suffices."""

    errors: GradientErrors
    """The errors of the parameters that are judged."""
    measure: Deviation
    unavoidable: Deviation
    """The same with nothing but weights of the format's precision."""
    tolerance: Tolerance

    @classmethod
    def of(
        cls,
        passes: FormatPasses,
        unavoidable: FormatPasses,
        unjudged: Collection[str],
        needed_db: float = NEEDED_DB,
    ) -> FormatVerdict:
        """The verdict of some steps."""
        alone = unavoidable.measure(unjudged)
        tolerance = Tolerance(gradient_db=needed_db).beside(alone)
        return cls(passes.errors(unjudged), passes.measure(unjudged), alone, tolerance)

    @property
    def will_do(self) -> bool:
        """Whether loss and gradients keep to the tolerance."""
        return self.tolerance.harm(self.measure) <= 1

    @property
    def loss_will_do(self) -> bool:
        """Whether the loss keeps to the tolerance; NaN does not."""
        return self.measure.judged_loss <= self.tolerance.loss

    def parameter_will_do(self, name: str) -> bool:
        """Whether a parameter's gradient keeps to the tolerance; one that is not judged does."""
        needed, ratio = self.tolerance.gradient_db, self.errors.beyond.get(name, 0.0)
        return needed is None or ratio_db(1.0, ratio) >= needed
