"""How far a model's loss and gradients are from float32's when its ops are cast in some way.

Both are taken on the same batches, from the same weights, with the same random numbers.

    loss        sum over batches of |L - L32|, over the sum of |L32|
    gradients   SQNR in dB of each parameter's gradient, squares summed over batches, so that a
                gradient that is small on one batch by chance does not count as lost
    worst       the parameter that fares worst. All gradients taken as one vector would not show a
                layer whose gradient underflows beside one whose gradient is a hundred times larger

A gradient can be nothing but rounding errors in float32 already: that of a bias before a
normalisation is zero by theory. Such a parameter shows when all weights are changed by about one
part in a million, which moves a gradient that means something by as little. It is not judged.

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
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from mprun.numerics.passes import FLOAT32, NotMeasurableError, Pass, Passes, Way
from mprun.numerics.sqnr import sums_db

LOSS_SCALES = {torch.float16: (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)}
"""Loss scales that are tried, the largest first; other dtypes need none."""

CHANGE = 2.0**-20
"""By which share weights are changed to find gradients that are rounding errors."""
ROUNDING_DB = 20.0
"""SQNR after that change below which a gradient is: one that means something keeps about 100."""

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
        self._judged = self._find_judged()

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Parameters whose gradients are rounding errors in float32 already."""
        pairs = zip(self._passes.names, self._judged, strict=True)
        return tuple(name for name, is_judged in pairs if not is_judged)

    def measure(self, way: Way) -> Measure:
        """How far from float32's loss and gradients are when ops are cast in this way."""
        found = [self._on_batch(way, n) for n in range(self._count)]
        change = sum(abs(x.loss - exact) for (x, _), exact in zip(found, self._losses, strict=True))
        whole = sum(map(abs, self._losses))
        relative = change / whole if whole else 0.0 if change == 0 else math.inf
        scale = min(scale for _, scale in found)
        batches = enumerate(x.gradients for x, _ in found)
        if any(x.gradients is None for x, _ in found):
            failure = max(x.failure for x, _ in found)
            return Measure(relative, math.nan, math.nan, "", scale, failure)
        noise = _sums(self._noise(g, n) for n, g in batches if g is not None)
        rows = zip(self._passes.names, self._signal, noise, self._judged, strict=True)
        judged = [(name, signal, e) for name, signal, e, is_judged in rows if is_judged]
        whole_db = sums_db(sum(s for _, s, _ in judged), sum(e for _, _, e in judged))
        each = [(sums_db(s, e), name) for name, s, e in judged] or [(math.inf, "")]
        worst_db, worst = min(each, key=lambda x: -math.inf if math.isnan(x[0]) else x[0])
        return Measure(relative, whole_db, worst_db, worst, scale)

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

    def _find_judged(self) -> list[bool]:
        """Whether each parameter's gradient is more than rounding errors."""
        with changed(self._passes.parameters, CHANGE):
            passes = [self._passes.run(FLOAT32, n) for n in range(self._count)]
        noise = _sums(self._noise(_finite(found, n), n) for n, found in enumerate(passes))
        return [sums_db(s, e) >= ROUNDING_DB for s, e in zip(self._signal, noise, strict=True)]

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
def changed(parameters: Sequence[Tensor], most: float) -> Iterator[None]:
    """Each weight moved by a share of itself of at most `most`, drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(OWN_SEED)
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


def _sums(batches: Iterable[list[float]]) -> list[float]:
    """For each parameter the sum over batches."""
    return [sum(column) for column in zip(*batches, strict=True)]
