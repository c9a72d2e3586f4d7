"""How far a model's loss and gradients are from float32's when its ops are cast in some way.

Both are taken on the same batches, from the same weights, with the same random numbers.

    loss        sum over batches of |L - L32|, over the sum of |L32|
    gradients   SQNR in dB of each parameter's gradient, squares summed over batches, so that a
                gradient that is small on one batch by chance does not count as lost
    worst       the parameter that fares worst. All gradients taken as one vector would not show a
                layer whose gradient underflows beside one whose gradient is a hundred times larger

A gradient that is zero, or nothing but rounding errors in float32 already (`rounding_errors.py`),
is not judged: only that it is finite counts.

How small a difference can be depends on the model. ReLU, max-pooling and batch normalisation hand
on a sign or a scale that a rounding error may turn: gradients of a ResNet-18 in bfloat16 have 7 dB,
and it trains. Weights that have the dtype's precision and nothing else of it cost as much: where
they alone lead below 30 dB, everything in the dtype was at most 3 dB worse (seven models,
benchmarks/op_noise.py). An op that does not stand the dtype is worse by far.

float16 gradients are taken with a loss scale: the largest of those given at which they are finite,
as a dynamic scale would find.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from mprun.errors import first_line
from mprun.numerics.passes import FLOAT32, NotMeasurableError, Pass, Passes, Way
from mprun.numerics.rounding_errors import (
    FLOAT64,
    MOVE,
    MOVED,
    MOVES,
    Reference,
    RoundingErrors,
    other_loss,
)
from mprun.numerics.sampling import gradient_error, loss_error
from mprun.numerics.sqnr import sums_db

LOSS_SCALES = {torch.float16: (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)}
"""Loss scales that are tried, the largest first; other dtypes need none."""

OWN_SEED = 2**31 - 1
"""Of random changes: with the seed that weights were drawn from, the two would be correlated."""


class Measure(NamedTuple):
    """How far a way is from float32."""

    loss_difference: float
    """Relative; infinite or NaN where a loss is."""
    gradients_db: float
    """SQNR of all judged gradients as one vector; NaN where one is not finite."""
    worst_db: float
    """SQNR of the parameter that fares worst; NaN as above."""
    worst_parameter: str
    """Its name; empty where a loss is not finite."""
    loss_scale: float
    """The smallest that was taken on any batch."""
    failure: str = ""
    """Why nothing could be measured: an op that cannot be computed so."""
    loss_beyond: float | None = None
    """The difference of the loss beyond what losses of batches differ by; None where that is not
    known."""
    beyond_db: float | None = None
    """The least SQNR of a parameter when only error counts that is beyond what gradients of batches
    differ by (`sampling.py`); None where that is not known."""
    beyond_parameter: str = ""
    """Which parameter has it."""

    @property
    def judged_loss(self) -> float:
        """The difference of the loss that counts."""
        return self.loss_difference if self.loss_beyond is None else self.loss_beyond

    @property
    def judged_db(self) -> float:
        """The SQNR that counts."""
        return self.worst_db if self.beyond_db is None else self.beyond_db


class Probe:
    """Measures one model on fixed batches.

    Args:
        passes: the model and its batches.
        loss_scales: tried in this order until gradients are finite.

    Raises:
        NotMeasurableError: a loss or a gradient is not finite in float32.
    """

    def __init__(self, passes: Passes, loss_scales: Sequence[float] = (1.0,)) -> None:
        self._passes = passes
        self._scales = tuple(loss_scales)
        self._count = len(passes.batches)
        self._losses: list[float] = []
        self._gradients: list[list[Tensor]] = []
        for n in range(self._count):
            found = passes.run(FLOAT32, n)
            self._losses.append(found.loss)
            self._gradients.append(_finite(found, n))
        self._signal = _sums(map(_energies, self._gradients))
        self._variance = _variances(self._gradients)
        """Of each parameter's gradient over batches, times their number, as `_signal` is a sum."""
        self._loss_deviation = stdev(self._losses) if self._count > 1 else 0.0
        self.reference = FLOAT64
        """What tells gradients that are rounding errors."""
        errors = self._rounding_errors()
        self.unjudged = errors.undetermined
        """Parameters whose gradients are rounding errors in float32 already."""
        self.zero = errors.zero
        """Parameters whose gradients are exactly zero in float32."""
        self._judged = [name not in (*self.unjudged, *self.zero) for name in passes.names]

    def measure(self, way: Way) -> Measure:
        """How far from float32's loss and gradients are when ops are cast in this way."""
        found = [self._on_batch(way, n) for n in range(self._count)]
        change = sum(abs(x.loss - exact) for (x, _), exact in zip(found, self._losses, strict=True))
        whole = sum(map(abs, self._losses))
        beyond = loss_error(change, whole, self._count * self._loss_deviation)
        relative, beyond = (
            x / whole if whole else 0.0 if x == 0 else math.inf for x in (change, beyond)
        )
        scale = min(scale for _, scale in found)
        batches = [x.gradients for x, _ in found]
        if any(gradients is None for gradients in batches):
            failure = max(x.failure for x, _ in found)
            return Measure(relative, math.nan, math.nan, "", scale, failure)
        seen = [gradients for gradients in batches if gradients is not None]
        noise = _sums(self._noise(gradients, n) for n, gradients in enumerate(seen))
        product = _sums(map(_products, seen, self._gradients))
        rows = list(zip(self._passes.names, self._signal, noise, self._judged, strict=True))
        counted = [is_judged or not math.isfinite(e) for _, _, e, is_judged in rows]
        judged = [(n, s, e) for (n, s, e, _), counts in zip(rows, counted, strict=True) if counts]
        whole_db = sums_db(sum(s for _, s, _ in judged), sum(e for _, _, e in judged))
        worst_db, worst = _worst(judged)
        errors = map(gradient_error, noise, self._signal, product, self._variance)
        named = zip(self._passes.names, self._signal, errors, counted, strict=True)
        beyond_db, where = _worst([(n, s, e) for n, s, e, counts in named if counts])
        return Measure(relative, whole_db, worst_db, worst, scale, "", beyond, beyond_db, where)

    def unavoidable(self, dtype: torch.dtype) -> Measure:
        """How far from float32 weights alone lead that have the precision of a dtype.

        Each is moved at random by as much as rounding to that dtype moves it at most; everything is
        computed in float32, so that no range is exceeded.
        """
        with changed(self._passes.parameters, torch.finfo(dtype).eps / 2):
            return self.measure(FLOAT32)

    def time_ratio(self, base: Way, other: Way, repeats: int) -> float | None:
        """Time of a forward and a backward pass in one way over that in another.

        None where one of them fails.

        Args:
            base: the way that is divided by.
            other: the way that is compared with it.
            repeats: how many are timed of each, in turn; their medians are compared.
        """
        if any(self._passes.run(way, 0).failure for way in (base, other)):
            return None
        a: list[float] = []
        b: list[float] = []
        for turn in range(repeats + 1):
            pair = ((base, a), (other, b)) if turn % 2 else ((other, b), (base, a))
            for way, times in pair:
                times.append(self._passes.time_s(way, self._scales[0]))
        return median(b[1:]) / median(a[1:])  # the first of each is warm-up

    def _rounding_errors(self) -> RoundingErrors:
        """What float64 passes say of the float32 gradients, or moved weights where there are none.

        Sets `reference`.
        """
        errors = RoundingErrors()
        for n in range(self._count):
            try:
                exact = self._passes.run_in_float64(n)
            except Exception as error:  # whatever a model's own code does not do in float64
                reason = first_line(error)
            else:
                reason = other_loss(self._losses[n], exact.loss)
            if reason or exact.gradients is None:
                self.reference = Reference(MOVED, reason)
                return self._rounding_errors_by_moves()
            errors.add(self._named(self._gradients[n]), self._named(exact.gradients))
        return errors

    def _rounding_errors_by_moves(self) -> RoundingErrors:
        moved: list[list[list[Tensor]]] = [[] for _ in range(self._count)]
        for turn in range(MOVES):
            with changed(self._passes.parameters, MOVE, OWN_SEED + turn):
                for n, found in enumerate(moved):
                    found.append(_finite(self._passes.run(FLOAT32, n), n))
        errors = RoundingErrors()
        for gradients, found in zip(self._gradients, moved, strict=True):
            float32 = self._named(gradients)
            errors.add(float32, float32, [self._named(other) for other in found])
        return errors

    def _named(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._passes.names, gradients, strict=True))

    def _on_batch(self, way: Way, n: int) -> tuple[Pass, float]:
        """The pass with the largest loss scale at which its gradients are finite, or the last."""
        for scale in self._scales:
            found = self._passes.run(way, n, scale)
            if found.gradients is None or all(map(math.isfinite, _energies(found.gradients))):
                break
        return found, scale

    def _noise(self, gradients: Sequence[Tensor], n: int) -> list[float]:
        """Each gradient's squared error on batch number `n`."""
        pairs = zip(gradients, self._gradients[n], strict=True)
        return _energies([found - exact for found, exact in pairs])


@contextmanager
def changed(parameters: Sequence[Tensor], most: float, seed: int = OWN_SEED) -> Iterator[None]:
    """Each weight moved by a share of itself of at most `most`, drawn from a fixed seed."""
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


def _finite(found: Pass, n: int) -> list[Tensor]:
    """The gradients of a float32 pass.

    Raises:
        NotMeasurableError: they are none, or the loss is not finite.
    """
    if found.gradients is None:
        raise NotMeasurableError(
            f"in float32 the loss of batch {n} is {found.loss}: nothing to compare with"
        )
    if not all(map(math.isfinite, _energies(found.gradients))):
        raise NotMeasurableError(
            f"in float32 a gradient of batch {n} is not finite: nothing to compare with"
        )
    return found.gradients


def _energies(tensors: Sequence[Tensor]) -> list[float]:
    """The sum of squares of each."""
    norms = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors])
    return [norm * norm for norm in norms.tolist()]


def _worst(rows: Sequence[tuple[str, float, float]]) -> tuple[float, str]:
    """The least SQNR, and the parameter that has it, of names, signals and errors."""
    each = [(sums_db(s, e), name) for name, s, e in rows] or [(math.inf, "")]
    return min(each, key=lambda x: -math.inf if math.isnan(x[0]) else x[0])


def _products(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """The scalar product of each pair."""
    pairs = zip(found, exact, strict=True)
    return [float((a.double() * b.double()).sum()) for a, b in pairs]


def _variances(batches: Sequence[Sequence[Tensor]]) -> list[float]:
    """For each parameter the sum over batches of the variance of its gradient; 0 for one batch."""
    count = len(batches)
    if count == 1:
        return [0.0] * len(batches[0])
    means = [sum(column[1:], column[0]) / count for column in zip(*batches, strict=True)]
    sums = _sums(_energies([g - m for g, m in zip(x, means, strict=True)]) for x in batches)
    return [total * count / (count - 1) for total in sums]


def _sums(batches: Iterable[list[float]]) -> list[float]:
    """For each parameter the sum over batches."""
    return [sum(column) for column in zip(*batches, strict=True)]
