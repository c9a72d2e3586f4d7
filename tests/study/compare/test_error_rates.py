"""How often verdicts on metric and speed are wrong, by simulation with a known truth.

Rates are checked against 5 % plus four standard errors of a share of 5 % over the repetitions
(4 sqrt(0.05 0.95 / 2000) = 1.9 %), which sound verdicts exceed once in 30,000 draws, and these are
seeded. Where accuracies are binomial the normal distribution is an approximation;
benchmarks/README.md gives rates over 200,000 repetitions (`python -m benchmarks.error_rates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from mprun.study.compare.statistics import geometric_mean, summarise
from mprun.study.compare.times import SAME, judge_ratio
from mprun.study.compare.verdicts import Evidence, judge

REPETITIONS = 2000
MARGIN = 0.005
AT_MOST = 0.05 + 4 * math.sqrt(0.05 * 0.95 / REPETITIONS)

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, ...], float], Floats]
"""Scores of a shape (repetitions, variants, seeds), better by the third argument than without."""


def normal(rng: np.random.Generator, shape: tuple[int, ...], shift: float) -> Floats:
    """Noise of 0.3 points."""
    return 0.9 + shift + rng.normal(0, 0.003, shape)


def binomial(samples: int, rate: float) -> Draw:
    """Hits among `samples`: skewed where the rate is near 1, and on a grid of 1 / samples."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], shift: float) -> Floats:
        found: Floats = rng.binomial(samples, rate + shift, shape) / samples
        return found

    draw.__name__ = f"binomial {rate} of {samples}"
    return draw


def shares(draw: Draw, seeds: int, variants: int, shift: float, resolution: float) -> list[float]:
    """The share of comparisons with any `worse`, `better`, and `equivalent`."""
    rng = np.random.default_rng(20)
    of_seed = rng.normal(0, 0.002, (REPETITIONS, 1, seeds)) if draw is normal else 0.0
    base = draw(rng, (REPETITIONS, 1, seeds), 0.0) + of_seed
    differences = draw(rng, (REPETITIONS, variants, seeds), shift) + of_seed - base
    found = np.zeros(3)
    for rows in differences.tolist():
        evidence = [Evidence(summarise(row, resolution), MARGIN, "points") for row in rows]
        words = {verdict.word for verdict in judge(evidence, higher_is_better=True)}
        found += [word in words for word in ("worse", "better", "equivalent")]
    return list(found / REPETITIONS)


SKEWED = [
    (binomial(10_000, 0.98), 1e-4),
    (binomial(200, 0.97), 1 / 200),
    (binomial(100, 0.9), 0.01),
]
CASES = [(normal, 0.0), *SKEWED]
IDS = [draw.__name__ for draw, _ in CASES]


@pytest.mark.representative("normal-2-5", "binomial 0.97 of 200-5-1", "binomial 0.9 of 100-2-1")
@pytest.mark.parametrize("variants", [1, 5])
@pytest.mark.parametrize("seeds", [2, 5])
@pytest.mark.parametrize(("draw", "resolution"), CASES, ids=IDS)
def test_what_does_not_differ_is_seldom_called_worse_or_better(
    draw: Draw, resolution: float, seeds: int, variants: int
) -> None:
    worse, better, _ = shares(draw, seeds, variants, 0.0, resolution)
    assert worse + better <= AT_MOST


@pytest.mark.representative("normal-5-1", "binomial 0.98 of 10000-2-5")
@pytest.mark.parametrize("variants", [1, 5])
@pytest.mark.parametrize("seeds", [2, 5])
@pytest.mark.parametrize(("draw", "resolution"), CASES, ids=IDS)
def test_what_differs_by_one_margin_is_seldom_called_equivalent(
    draw: Draw, resolution: float, seeds: int, variants: int
) -> None:
    assert shares(draw, seeds, variants, -MARGIN, resolution)[2] <= AT_MOST


@pytest.mark.parametrize("seeds", [2, 3, 10])
@pytest.mark.parametrize(
    ("truth", "noise", "false"),
    [(1.0, 0.1, ("higher", "lower")), (SAME, 0.03, ("same",))],
    ids=["as fast", "5 % faster"],
)
def test_a_speed_is_seldom_claimed_falsely(
    truth: float, noise: float, false: tuple[str, ...], seeds: int
) -> None:
    ratios = truth * np.exp(np.random.default_rng(7).normal(0, noise, (REPETITIONS, seeds)))
    claims = sum(judge_ratio(geometric_mean(row)).word in false for row in ratios.tolist())
    assert claims / REPETITIONS <= AT_MOST


def test_the_rates_come_near_the_nominal_one() -> None:
    """They would be low too if nothing were ever said; one variant's tests use up their 5 %.

    What is equal is called equivalent where it can be, so the noise here is one at which that is
    rare: 1 point, of which 5 seeds make an interval wider than the margin.
    """

    def wide(rng: np.random.Generator, shape: tuple[int, ...], shift: float) -> Floats:
        return shift + rng.normal(0, 0.01, shape)

    worse, better, _ = shares(wide, 5, 1, 0.0, 0.0)
    at_least = 0.05 - 4 * math.sqrt(0.05 * 0.95 / REPETITIONS)
    assert at_least <= worse + better <= AT_MOST
    assert at_least <= shares(normal, 5, 1, -MARGIN, 0.0)[2] <= AT_MOST


def test_what_is_equal_or_far_off_is_found() -> None:
    assert shares(normal, 10, 5, 0.0, 0.0)[2] > 0.9
    assert shares(normal, 5, 1, -4 * MARGIN, 0.0)[0] > 0.95
    assert shares(normal, 5, 1, 4 * MARGIN, 0.0)[1] > 0.95
