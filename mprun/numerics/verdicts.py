"""Range or precision: which 16-bit format a tensor, or a whole model, needs.

float16 and bfloat16 spend 15 bits differently: float16 has 11 significand bits and 30 normal
exponents, bfloat16 8 and 254. What does not fit float16's exponents needs *range*; what 8 bits are
too few for needs *precision*. Both show as noise, so one criterion tells them apart:

    both formats will do        either
    bfloat16 alone              needs range: bf16
    float16 alone               needs precision: fp16
    neither                     needs fp32

The verdict on a model is taken from losses and weight gradients as they come out of a forward and
backward pass in each format, and by the criterion of `tolerance.py`: a format will do where the
loss and the gradient of the parameter that fares worst are as near to float32's as is needed, or
nearly as near as weights of the format's precision lead by themselves.

For one tensor it is about rounding its values. Rounding alone rarely leaves less than 50 dB in
bfloat16, but it adds up through a model and is enlarged where numbers cancel. Where the passes in a
format are fine, a tensor that it holds badly is none that matters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

from mprun.numerics.probe import Measure
from mprun.numerics.rounding_errors import power
from mprun.numerics.sampling import gradient_error, loss_error
from mprun.numerics.sqnr import ratio_db
from mprun.numerics.tolerance import NEEDED_DB, Tolerance

EITHER, RANGE, PRECISION, FP32 = (
    "either",
    "needs range: bf16",
    "needs precision: fp16",
    "needs fp32",
)


def range_or_precision(fp16: bool, bf16: bool) -> str:
    """The verdict on whether the two formats will do."""
    if fp16 and bf16:
        return EITHER
    if bf16:
        return RANGE
    return PRECISION if fp16 else FP32


@dataclass(frozen=True)
class Errors:
    """How far some gradients are from the exact ones, parameter by parameter."""

    ratios: Mapping[str, float]
    """Parameter to noise power over signal power; infinite where a gradient is not finite."""
    beyond: Mapping[str, float] = field(default_factory=dict)
    """The same of noise beyond what gradients differ by from batch to batch (`sampling.py`)."""

    @property
    def mean(self) -> float:
        """The mean ratio: every parameter counts the same, whatever the size of its gradient."""
        return sum(self.ratios.values()) / len(self.ratios) if self.ratios else 0.0

    @property
    def db(self) -> float:
        """The mean as a signal-to-noise ratio."""
        return ratio_db(1.0, self.mean)

    def db_of(self, name: str) -> float:
        """That of one parameter."""
        return ratio_db(1.0, self.ratios[name])


def errors(
    exact: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    variances: Mapping[str, float] | None = None,
) -> Errors:
    """Compare gradients, in float64.

    Parameters whose exact gradient is 0 are left out, unless what was found is not finite.

    Args:
        exact: parameter to gradient.
        found: these parameters at least, unscaled.
        variances: parameter to the power of what the exact gradient differs by between batches.
    """
    ratios, beyond = {}, {}
    for name, gradient in exact.items():
        true, low = gradient.double(), found[name].double()
        signal, noise = power(true), power(low - true)
        if not math.isfinite(noise):
            ratios[name] = beyond[name] = math.inf
        elif signal:
            variance = 0.0 if variances is None else variances[name]
            product = float((true * low).sum())
            ratios[name] = noise / signal
            beyond[name] = gradient_error(noise, signal, product, variance) / signal
    return Errors(ratios, beyond)


def variances(halves: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """What gradients of a batch differ by from those of others, from gradients of its halves.

    Args:
        halves: parameter to gradient of the mean loss over each half.
    """
    first, second = halves
    return {name: power(first[name].double() - second[name].double()) / 4 for name in first}


def typical_errors(steps: Iterable[Errors]) -> Errors:
    """The median over steps, parameter by parameter; infinite where any step's is.

    Not the mean: rounding now and then turns a ReLU on or off that lies at 0, or makes a pooling
    take another of two equal values. The gradients of that step are then off by as much as if a
    sample had been left out, in every format, and would stand for all steps.
    """
    seen = list(steps)
    return Errors(_typical([x.ratios for x in seen]), _typical([x.beyond for x in seen]))


def _typical(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, ratio in step.items():
            found.setdefault(name, []).append(ratio)
    return {
        name: max(ratios) if math.inf in ratios else median(ratios)
        for name, ratios in found.items()
    }


class Deviations:
    """How far passes in one format were from float32's, over some steps."""

    def __init__(self) -> None:
        self._steps: list[Errors] = []
        self._change = self._whole = self._squares = 0.0
        self._scale = math.inf

    def add(
        self,
        gradients: Errors,
        loss: float,
        float32: float,
        deviation: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """One more step.

        Args:
            gradients: the errors of its gradients.
            loss: its loss.
            float32: float32's loss.
            deviation: an estimate of what that differs by from batch to batch.
            scale: the loss scale that the gradients were taken with.
        """
        self._steps.append(gradients)
        self._change += abs(loss - float32)
        self._whole += abs(float32)
        self._squares += deviation**2
        self._scale = min(self._scale, scale)

    def errors(self, unjudged: Collection[str] = ()) -> Errors:
        """The typical errors of parameters; of unjudged ones only what is not finite counts."""
        typical = typical_errors(self._steps)
        counted = {n for n, r in typical.ratios.items() if n not in unjudged or r == math.inf}
        ratios, beyond = (
            {n: r for n, r in x.items() if n in counted} for x in (typical.ratios, typical.beyond)
        )
        return Errors(ratios, beyond)

    def measure(self, unjudged: Collection[str] = ()) -> Measure:
        """All of it."""
        errors = self.errors(unjudged)
        worst_db, worst = _worst(errors.ratios)
        beyond_db, where = _worst(errors.beyond)
        deviation = math.sqrt(len(self._steps) * self._squares)  # the root mean square, each step
        loss, beyond = (
            0.0 if x == 0 else x / self._whole if self._whole else math.inf
            for x in (self._change, loss_error(self._change, self._whole, deviation))
        )
        return Measure(loss, errors.db, worst_db, worst, self._scale, "", beyond, beyond_db, where)


def _worst(ratios: Mapping[str, float]) -> tuple[float, str]:
    """The least signal-to-noise ratio in dB, and the parameter that has it."""
    name = max(ratios, key=lambda name: ratios[name], default="")
    return (ratio_db(1.0, ratios[name]), name) if name else (math.inf, "")


@dataclass(frozen=True)
class Standing:
    """Whether a format will do."""

    errors: Errors
    """Of the parameters that are judged."""
    measure: Measure
    unavoidable: Measure
    """What weights of the format's precision lead to by themselves."""
    tolerance: Tolerance
    """What is tolerated beside that."""

    @classmethod
    def of(
        cls,
        passes: Deviations,
        unavoidable: Deviations,
        unjudged: Collection[str],
        needed_db: float = NEEDED_DB,
    ) -> Standing:
        """What some steps come to."""
        alone = unavoidable.measure(unjudged)
        tolerance = Tolerance(gradient_db=needed_db).beside(alone)
        return cls(passes.errors(unjudged), passes.measure(unjudged), alone, tolerance)

    @property
    def will_do(self) -> bool:
        """Whether loss and gradients are within what is tolerated."""
        return self.tolerance.harm(self.measure) <= 1

    @property
    def loss_will_do(self) -> bool:
        """Whether the loss is; NaN is not."""
        return self.measure.judged_loss <= self.tolerance.loss

    def parameter_will_do(self, name: str) -> bool:
        """Whether the gradient of a parameter is; one that is not judged is."""
        needed, ratio = self.tolerance.gradient_db, self.errors.beyond.get(name, 0.0)
        return needed is None or ratio_db(1.0, ratio) >= needed
