"""Range or precision: which 16-bit format a tensor, or a whole model, needs.

float16 and bfloat16 spend 15 bits differently: float16 has 11 significand bits and 30 normal
exponents, bfloat16 8 and 254. What does not fit float16's exponents needs *range*; what 8 bits are
too few for needs *precision*. Both show as noise, so one threshold tells them apart:

    both formats keep enough signal over noise      either
    bfloat16 alone                                  needs range: bf16
    float16 alone                                   needs precision: fp16
    neither                                         needs fp32

20 dB are enough unless told otherwise: the noise has then a hundredth of the signal's power, a
tenth of its size, which is little beside what a gradient differs from one batch to the next.

For one tensor this is about rounding its values. Rounding alone rarely leaves less than 50 dB in
bfloat16, but it adds up through a model and is enlarged where numbers cancel. So the verdict on the
whole is taken from weight gradients as they come out of a forward and backward pass in each format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from mprun.numerics.sqnr import ratio_db

NEEDED_DB = 20.0
EITHER, RANGE, PRECISION, FP32 = (
    "either",
    "needs range: bf16",
    "needs precision: fp16",
    "needs fp32",
)


def range_or_precision(fp16_db: float, bf16_db: float, needed_db: float = NEEDED_DB) -> str:
    """The verdict on signal-to-noise ratios in the two formats; NaN is less than enough."""
    fp16, bf16 = fp16_db >= needed_db, bf16_db >= needed_db
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


def errors(exact: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Errors:
    """Compare gradients, in float64; parameters whose exact gradient is 0 are left out.

    Args:
        exact: parameter to gradient.
        found: these parameters at least, unscaled.
    """
    ratios = {}
    for name, true in exact.items():
        signal = true.double().square().sum().item()
        if signal:
            noise = (found[name].double() - true.double()).square().sum().item()
            ratios[name] = noise / signal if math.isfinite(noise) else math.inf
    return Errors(ratios)


def undetermined(
    exact: Mapping[str, Tensor], jittered: Mapping[str, Tensor], needed_db: float = NEEDED_DB
) -> set[str]:
    """Parameters whose gradient is rounding noise in float32 already.

    The bias of a layer before a normalization, or of attention's keys, changes nothing: its
    gradient is 0, and what float32 gives is what rounding left of sums that cancel. Against such
    numbers no format can be measured. They are told by moving the weights by a float32 unit: if
    that changes a gradient by more than is allowed of a format, float32 does not determine it.

    Args:
        exact: parameter to gradient.
        jittered: the same with weights moved by about 2^-23 of their size.
        needed_db: signal over change that is enough.
    """
    changes = errors(exact, jittered)
    return {name for name in changes.ratios if changes.db_of(name) < needed_db}


def typical_errors(steps: Iterable[Errors]) -> Errors:
    """The median over steps, parameter by parameter; infinite where any step's is.

    Not the mean: rounding now and then turns a ReLU on or off that lies at 0, or makes a pooling
    take another of two equal values. The gradients of that step are then off by as much as if a
    sample had been left out, in every format, and would stand for all steps.
    """
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, ratio in step.ratios.items():
            found.setdefault(name, []).append(ratio)
    return Errors(
        {
            name: max(ratios) if math.inf in ratios else median(ratios)
            for name, ratios in found.items()
        }
    )
