"""Gradients that are zero but for rounding: the one rule that recognises them.

The bias of a layer before a normalisation, or of attention's keys, changes nothing: its gradient is
0, and what float32 gives is what rounding leaves of sums that cancel. No format can be measured
against such numbers. They are recognised by the float64 gradient of the same weights, samples and
random numbers:

    zero           every float32 gradient is exactly 0: a branch that is switched off, a parameter
                   that no output depends on
    undetermined   the float32 gradient is not 0, and its error (its difference from float64's) is
                   more than a tenth of the true gradient, over all samples looked at

Of a gradient that means something float32 keeps some 100 dB, of one that cancels about -150 dB: the
limit, 20 dB, is far from both.

A model that cannot be computed in float64 has its weights moved by about one part in a million
instead, three times: float32 gradients that mean something move by as little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mprun.numerics.sqnr import sums_db

LIMIT_DB = 20.0
"""Signal over error below which float32 does not determine a gradient."""
MOVES = 3
"""How often weights are moved where a model cannot be computed in float64."""
MOVE = 2.0**-20
"""By which share of themselves."""
SAME_LOSS = 1e-3
"""Relative difference of the losses above which the float64 pass computed something else: a model
whose code branches on dtypes, or draws random numbers in a way that is not followed."""


class Reference(NamedTuple):
    """What float32 gradients were compared with."""

    name: str
    """float64, or `MOVED`."""
    reason: str = ""
    """Why it is not float64."""


MOVED = "float32 with weights moved by 2^-20"
FLOAT64 = Reference("float64")


def other_loss(float32: float, float64: float) -> str:
    """Why a float64 pass is none of the same model; empty where its loss is float32's."""
    if abs(float32 - float64) <= SAME_LOSS * max(abs(float32), abs(float64)):
        return ""
    return f"its loss is {float64:g} there and {float32:g} in float32"


class RoundingErrors:
    """Signal and error of float32 gradients, summed over batches or steps."""

    def __init__(self) -> None:
        self._signal: dict[str, float] = {}
        self._error: dict[str, float] = {}
        self._float32: dict[str, float] = {}

    def add(
        self,
        float32: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        others: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        """Look at the gradients of one batch.

        Args:
            float32: parameter to gradient.
            exact: the same in float64; where there is none, what stands for it.
            others: further gradients that would equal `exact` if nothing were rounded.
        """
        for name, found in float32.items():
            true = exact[name].double()
            errors = [power(x.double() - true) for x in (found, *(o[name] for o in others))]
            _add(self._signal, name, power(true))
            _add(self._error, name, max(errors))
            _add(self._float32, name, power(found.double()))

    @property
    def zero(self) -> tuple[str, ...]:
        """Parameters whose float32 gradient is exactly 0."""
        return tuple(name for name, energy in self._float32.items() if energy == 0)

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Parameters whose float32 gradient is rounding errors."""
        return tuple(
            name
            for name, energy in self._float32.items()
            if energy and not self._db(name) >= LIMIT_DB
        )

    def _db(self, name: str) -> float:
        return sums_db(self._signal[name], self._error[name])


def power(x: Tensor) -> float:
    """The sum of squares; infinite where a number is not finite."""
    norm = float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64))
    return norm * norm if math.isfinite(norm) else math.inf


def is_rounding(float32: float, exact: float) -> bool:
    """The rule for numbers of which the powers alone are known, such as those of hooks.

    Rounding errors have nothing to do with the signal, so that their power is the difference.

    Args:
        float32: the power of what float32 gave.
        exact: that of the same in float64.
    """
    return float32 > 0 and not sums_db(exact, abs(float32 - exact)) >= LIMIT_DB


def _add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = sums.get(name, 0.0) + value
