"""Gradients that are zero except for rounding: the one rule that recognises them.

The bias of a layer before a normalisation, or of attention's keys, changes nothing: its gradient is
0, and float32 gives the rounding errors of sums that cancel. No format can be compared with such
numbers. They are recognised by the float64 gradient of the same weights, samples and random
numbers:

    zero           every float32 gradient is exactly 0: a branch that is switched off, a parameter
                   that no output depends on
    undetermined   the float32 gradient is not 0, and its error (its difference from float64's) is
                   more than a tenth of the true gradient, over all samples

A meaningful gradient has about 100 dB in float32, one that cancels about -150 dB: the limit, 20 dB,
is far from both.

If a model cannot be computed in float64, its weights are moved by about one part in a million
instead, three times: meaningful float32 gradients change by as little.

Where all gradients together are that inexact, it is no matter of single parameters: float32 itself
is not good enough for the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mprun.errors import first_line
from mprun.numerics.sqnr import sums_db
from mprun.records.deviation import Reference
from mprun.records.numerics_record import Float32Gradients

LIMIT_DB = 20.0
"""Signal over error below which float32 does not determine a gradient."""
MOVES = 3
"""How often weights are moved where a model cannot be computed in float64."""
MOVE = 2.0**-20
"""The largest change of a weight, as a share of it."""
SAME_LOSS = 1e-3
"""Relative difference of the losses above which the float64 pass computed something else: a model
whose code branches on dtypes, or draws random numbers in a way that is not followed."""
OWN_SEED = 2**31 - 1
"""The seed of random changes: with that of the initial weights, both would be correlated."""

MOVED = "float32 with weights moved by 2^-20"
FLOAT64 = Reference("float64")

Gradients = Mapping[str, Tensor]
"""Parameter name to gradient."""


class RoundingErrors:
    """Signal and error of float32 gradients, summed over batches or steps."""

    def __init__(self) -> None:
        self.reference = FLOAT64
        """The gradients that float32's are compared with."""
        self._signal: dict[str, float] = {}
        self._error: dict[str, float] = {}
        self._float32: dict[str, float] = {}

    def compare(
        self,
        float32: Gradients,
        loss: float,
        in_float64: Callable[[], tuple[float, Gradients]],
        moved: Callable[[float, int], Gradients],
        is_same: Callable[[float], bool] = lambda loss: False,
    ) -> None:
        """Compare the gradients of one batch with float64's, or with those of moved weights.

        Args:
            float32: the gradients.
            loss: the float32 loss.
            in_float64: computes loss and gradients in float64. After its first failure, or another
                loss than float32's, it is not called again, and `reference` says why.
            moved: computes float32 gradients of weights moved by a share, drawn from a seed.
            is_same: whether a float64 loss that is not float32's is of the same computation, so
                that float32 itself is inexact.
        """
        if self.reference is FLOAT64:
            try:
                float64_loss, exact = in_float64()
                reason = _loss_differs(loss, float64_loss)
                reason = "" if reason and is_same(float64_loss) else reason
            except Exception as error:  # a model's own code may fail in float64 in any way
                reason = first_line(error)
            if not reason:
                self._add(float32, exact)
                return
            self.reference = Reference(MOVED, reason)
        self._add(float32, float32, [moved(MOVE, OWN_SEED + n) for n in range(MOVES)])

    def _add(self, float32: Gradients, exact: Gradients, others: Sequence[Gradients] = ()) -> None:
        """Add a batch; `others` would equal `exact` if nothing were rounded."""
        for name, gradient in float32.items():
            true = exact[name].double()
            errors = [power(x.double() - true) for x in (gradient, *(o[name] for o in others))]
            for sums, value in (
                (self._signal, power(true)),
                (self._error, max(errors)),
                (self._float32, power(gradient.double())),
            ):
                sums[name] = sums.get(name, 0.0) + value

    @property
    def of_float32(self) -> Float32Gradients | None:
        """How inexact all gradients of float32 are together, where that is more than `LIMIT_DB`."""
        db = sums_db(sum(self._signal.values()), sum(self._error.values()))
        if self.reference is not FLOAT64 or not db < LIMIT_DB:
            return None
        return Float32Gradients(db, max(self._error, key=self._error.__getitem__))

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
            if energy and not sums_db(self._signal[name], self._error[name]) >= LIMIT_DB
        )


def _loss_differs(float32: float, float64: float) -> str:
    """Why a float64 pass is not of the same model; empty where its loss is float32's."""
    largest = max(abs(float32), abs(float64))
    if math.isfinite(largest) and abs(float32 - float64) <= SAME_LOSS * largest:
        return ""
    return f"its loss is {float64:g} there and {float32:g} in float32"


def power(x: Tensor) -> float:
    """The sum of squares; infinite where a number is not finite."""
    norm = float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64))
    return norm * norm if math.isfinite(norm) else math.inf


def is_rounding(float32: float, exact: float) -> bool:
    """The rule for numbers of which only the powers are known, such as those of hooks.

    Rounding errors are independent of the signal, so their power is the difference.

    Args:
        float32: the power of the float32 numbers.
        exact: that of the same in float64.
    """
    return float32 > 0 and not sums_db(exact, abs(float32 - exact)) >= LIMIT_DB


@contextmanager
def weights_moved(
    parameters: Sequence[Tensor], most: float, seed: int = OWN_SEED
) -> Iterator[None]:
    """Each weight is moved by a random share of itself of at most `most`, and put back after."""
    generator = torch.Generator().manual_seed(seed)
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            share = (torch.rand(p.shape, generator=generator) * 2 - 1) * most
            p.mul_(1 + share.to(p.device))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
