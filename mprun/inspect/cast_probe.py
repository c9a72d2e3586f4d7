"""How far a model's loss and gradients are from float32's when its ops are cast by some plan.

Both are taken on the same batches, from the same weights, with the same random numbers.

    loss        sum over batches of |L - L32|, over the sum of |L32|
    gradients   SQNR in dB of each parameter's gradient, squares summed over batches, so that a
                gradient that is small on one batch by chance does not count as lost
    quantities  SQNR of each quantity of the recipe, against float64
    worst       the parameter with the lowest SQNR: all gradients as one vector would hide a layer
                whose gradient underflows beside one with larger gradients

How small a difference can be depends on the model: ReLU, max-pooling and batch normalisation pass
on a sign or a scale that a rounding error may turn. Weights with the dtype's precision alone cost
as much; where they give less than 30 dB, everything in the dtype was at most 3 dB worse (seven
models, benchmarks/op_noise.py). An op that does not tolerate the dtype is worse by far.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from statistics import stdev

import torch
from torch import Tensor

from mprun.errors import NotMeasurableError
from mprun.inspect.passes import FLOAT32, CastPlan, Pass, Passes, in_float64
from mprun.inspect.tolerance import Deviation, gradient_error, loss_shares
from mprun.precision.rounding import sums_db
from mprun.watch.updates import RoundingErrors, weights_moved

# Loss scales that are tried, the largest first; other dtypes need none
LOSS_SCALES = {torch.float16: (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)}


class CastProbe:
    """Measures one model on fixed batches under any cast plan.

    `loss_scales` are tried in this order until gradients are finite.

    Raises:
        NotMeasurableError: a loss or a gradient is not finite in float32.
    """

    def __init__(self, passes: Passes, loss_scales: Sequence[float] = (1.0,)) -> None:
        self.passes = passes
        self._scales = tuple(loss_scales)
        self._count = len(passes.batches)
        self._losses: list[float] = []
        self._gradients: list[list[Tensor]] = []
        for n in range(self._count):
            exact = passes.run(FLOAT32, n)
            self._losses.append(exact.loss)
            self._gradients.append(_finite(exact, n))
        self._signal = _sums(map(_energies, self._gradients))
        self._variance = _variances(self._gradients)
        """The variance of each gradient over batches, times their number: `_signal` is a sum."""
        # Of one batch nothing is known of others: no noise of batches is tolerated
        self._loss_deviation = stdev(self._losses) if self._count > 1 else 0.0
        self.rounding = RoundingErrors()
        """Which gradients are rounding errors, or zero, in float32 already: they are not judged."""
        for n in range(self._count):
            self._compare(n)
        unjudged = (*self.rounding.undetermined, *self.rounding.zero)
        self._judged = [name not in unjudged for name in passes.names]
        with in_float64(passes.model) if passes.quantities else nullcontext():
            self._values = passes.values(FLOAT32)

    def measure(self, plan: CastPlan) -> Deviation:
        """The distance of loss and gradients from float32's when ops are cast by this plan."""
        runs = [self._on_batch(plan, n) for n in range(self._count)]
        change = sum(abs(x.loss - exact) for (x, _), exact in zip(runs, self._losses, strict=True))
        whole = sum(map(abs, self._losses))
        relative, beyond = loss_shares(change, whole, self._count * self._loss_deviation)
        quantities_db = self._quantities_db(plan)
        scale = min(scale for _, scale in runs)  # the one at which no batch overflows
        batches = [x.gradients for x, _ in runs if x.gradients is not None]
        if len(batches) < len(runs):
            failure = max(x.failure for x, _ in runs)  # a text, if any pass has one
            return Deviation(
                relative, math.nan, math.nan, "", scale, failure, quantities_db=quantities_db
            )
        noise = _sums(map(_errors, batches, self._gradients))
        product = _sums(map(_products, batches, self._gradients))
        errors = list(map(gradient_error, noise, self._signal, product, self._variance))
        counts = [
            n
            for n, judged in enumerate(self._judged)
            if judged or not math.isfinite(noise[n])  # a step with an overflow cannot be taken
        ]
        whole_db = sums_db(sum(self._signal[n] for n in counts), sum(noise[n] for n in counts))
        worst_db, worst = self._worst(counts, noise)
        beyond_db, where = self._worst(counts, errors)
        figures = (relative, whole_db, worst_db, worst, scale, "", beyond, beyond_db, where)
        return Deviation(*figures, quantities_db)

    def _quantities_db(self, plan: CastPlan) -> dict[str, float]:
        """The SQNR of each quantity of the recipe against float64."""
        made = self.passes.values(plan)
        return {
            name: sums_db(float(x.square().sum()), float((made[name] - x).square().sum()))
            for name, x in self._values.items()
        }

    def unavoidable(self, dtype: torch.dtype) -> Deviation:
        """The distance from float32 of weights that have the precision of a dtype.

        Each is moved at random by at most as much as rounding to that dtype moves it; everything is
        computed in float32, so that no range is exceeded.
        """
        # Rounding to nearest moves a number by up to half a unit
        return self.with_moved(self.passes.names, torch.finfo(dtype).eps / 2)

    def with_moved(self, names: Collection[str], most: float) -> Deviation:
        """The distance from float32 of weights moved at random by at most this share of each.

        Those that are not trained stay.
        """
        named = zip(self.passes.names, self.passes.parameters, strict=True)
        with weights_moved([p for name, p in named if name in names], most):
            return self.measure(FLOAT32)

    def _compare(self, n: int) -> None:
        """Compare the float32 gradients of batch number `n` with float64's."""

        def exactly() -> tuple[float, dict[str, Tensor]]:
            with in_float64(self.passes.model):  # with the same random numbers
                exact = self.passes.run(FLOAT32, n)
            gradients = {} if exact.gradients is None else self._named(exact.gradients)
            return exact.loss, gradients

        def moved(most: float, seed: int) -> dict[str, Tensor]:
            with weights_moved(self.passes.parameters, most, seed):
                return self._named(_finite(self.passes.run(FLOAT32, n), n))

        float32 = self._named(self._gradients[n])
        self.rounding.compare(float32, self._losses[n], exactly, moved)

    def _named(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.passes.names, gradients, strict=True))

    def _on_batch(self, plan: CastPlan, n: int) -> tuple[Pass, float]:
        """The pass with the largest loss scale at which its gradients are finite, or the last."""
        for scale in self._scales:
            result = self.passes.run(plan, n, scale)
            if result.gradients is None or all(map(math.isfinite, _energies(result.gradients))):
                break
        return result, scale

    def _worst(self, counts: Sequence[int], errors: Sequence[float]) -> tuple[float, str]:
        """The lowest SQNR of the parameters of these numbers, and the parameter's name."""
        each = [(sums_db(self._signal[n], errors[n]), self.passes.names[n]) for n in counts]
        # A NaN is worse than any number; comparisons with it would leave the order open
        return min(each or [(math.inf, "")], key=lambda x: -math.inf if math.isnan(x[0]) else x[0])


def _finite(exact: Pass, n: int) -> list[Tensor]:
    """The gradients of a float32 pass."""
    if exact.gradients is None:
        raise NotMeasurableError(
            f"in float32 the loss of batch {n} is {exact.loss}: nothing to compare with"
        )
    if not all(map(math.isfinite, _energies(exact.gradients))):
        raise NotMeasurableError(
            f"in float32 a gradient of batch {n} is not finite: nothing to compare with"
        )
    return exact.gradients


def _energies(tensors: Sequence[Tensor]) -> list[float]:
    """The sum of squares of each."""
    norms = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors])
    return [norm * norm for norm in norms.tolist()]


def _errors(low: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """The squared error of each gradient."""
    return _energies([a - b for a, b in zip(low, exact, strict=True)])


def _products(low: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """The scalar product of each pair."""
    return [float((a.double() * b.double()).sum()) for a, b in zip(low, exact, strict=True)]


def _variances(batches: Sequence[Sequence[Tensor]]) -> list[float]:
    """For each parameter the sum over batches of the variance of its gradient; 0 for one batch."""
    count = len(batches)
    if count == 1:
        return [0.0] * len(batches[0])
    means = [sum(column[1:], column[0]) / count for column in zip(*batches, strict=True)]
    sums = _sums(_errors(x, means) for x in batches)
    # The unbiased variance is total / (count - 1); times the batches, as signal and noise are sums
    return [total * count / (count - 1) for total in sums]


def _sums(batches: Iterable[list[float]]) -> list[float]:
    """For each parameter the sum over batches."""
    return [sum(column) for column in zip(*batches, strict=True)]
