"""How often the tests behind a verdict are wrong where their assumptions hold roughly at best.

    python -m benchmarks.error_rates

For several distributions of a run's metric and numbers of seeds: the share of comparisons of two
equal variants that are found to differ, and of variants exactly one margin apart that are found
equivalent, over 200,000 comparisons each (standard error at 5 %: 0.05 points). Both should be 5 %
at most. Last: how often a mode is found equivalent that collapses on one seed in ten, which is
always wrong. The tests are those of mprun/study/compare/statistics.py, over arrays.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

REPETITIONS = 200_000
SEEDS = (2, 3, 5, 10)
MARGIN = 0.005
RELATIVE_MARGIN = 0.02

Floats = NDArray[np.float64]


def _t(differences: Floats, shift: Floats | float, resolution: float) -> Floats:
    """P(T < shift / standard error) for each row."""
    n = differences.shape[1]
    sd = np.maximum(differences.std(1, ddof=1), resolution / math.sqrt(12))
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Floats = stdtr(n - 1, shift / (sd / math.sqrt(n)))
    return result


def different(differences: Floats, resolution: float = 0.0) -> float:
    """The share of rows whose mean is found to differ from 0."""
    mean = np.abs(differences.mean(1))
    return float((2 * _t(differences, -mean, resolution) <= 0.05).mean())


def equivalent(differences: Floats, margin: float, resolution: float = 0.0) -> float:
    """The share of rows whose mean is found to lie inside the margin."""
    mean = np.abs(differences.mean(1))
    return float((_t(differences, mean - margin, resolution) <= 0.05).mean())


def _row(name: str, shares: list[float]) -> None:
    print(f"{name:58}" + "".join(f"{share:8.1%}" for share in shares))


def accuracies(rng: np.random.Generator, samples: int, rate: float) -> None:
    """Hits among the samples of a test set; the margin is half a point."""

    def drawn(n: int, shift: float = 0.0) -> Floats:
        base, other = (rng.binomial(samples, rate + s, (REPETITIONS, n)) for s in (0.0, shift))
        result: Floats = (other - base) / samples
        return result

    step, blank = 1 / samples, " " * 10
    name = f"accuracy {rate:.1%} of {samples} samples, equal: found different"
    _row(name, [different(drawn(n), step) for n in SEEDS])
    _row(f"{blank}without a floor of the spread", [different(drawn(n)) for n in SEEDS])
    for shift in (-MARGIN, MARGIN):
        shares = [equivalent(drawn(n, shift), MARGIN, step) for n in SEEDS]
        _row(f"{blank}{shift * 100:+.1f} points: found equivalent", shares)


def losses(rng: np.random.Generator, spread: float) -> None:
    """Differences as shares of the baseline's mean, which is itself an estimate."""

    def drawn(n: int) -> Floats:
        base = np.exp(rng.normal(0, spread, (REPETITIONS, n)))
        true_mean = math.exp(spread * spread / 2)
        differences = RELATIVE_MARGIN * true_mean + rng.normal(0, 0.01, base.shape)
        result: Floats = differences / base.mean(1, keepdims=True)
        return result

    shares = [equivalent(drawn(n), RELATIVE_MARGIN) for n in SEEDS]
    _row(f"loss that seeds spread by {spread:.0%}, +2 %: found equivalent", shares)


def collapses(rng: np.random.Generator, share: float, spread: float) -> None:
    """Equal but for a share of seeds that end at 10 %: the true mean is far outside the margin."""

    def drawn(n: int) -> Floats:
        differences = rng.normal(0, spread, (REPETITIONS, n))
        result: Floats = np.where(rng.random(differences.shape) < share, -0.8, differences)
        return result

    shares = [equivalent(drawn(n), MARGIN) for n in SEEDS]
    _row(f"1 seed in {1 / share:.0f} collapses, others spread by {spread:.2%}", shares)


def main() -> None:
    """Print a row per case."""
    print(f"{'seeds':58}" + "".join(f"{n:8}" for n in SEEDS))
    rng = np.random.default_rng(0)
    for samples, rate in ((10_000, 0.9), (10_000, 0.98), (1000, 0.98), (1000, 0.995), (100, 0.9)):
        accuracies(rng, samples, rate)
    for spread in (0.02, 0.1, 0.3):
        losses(rng, spread)
    print("found equivalent:")
    for spread in (0.0001, 0.0005, 0.001):
        collapses(rng, 0.1, spread)
    _row("none of n seeds collapses: 0.9 to the power of n", [0.9**n for n in SEEDS])


if __name__ == "__main__":
    main()
