"""How often verdicts on metric and speed are wrong, by simulation with a known truth.

Rates are checked against 5 % plus four standard errors of a share of 5 % over the studies
(4 sqrt(0.05 0.95 / 2000) = 1.9 %), which sound verdicts exceed once in 30,000 draws, and these are
seeded. `test_looks.py` shows that the simulation's verdicts are those of `compare`;
benchmarks/README.md gives rates over 100,000 studies (`python -m benchmarks.error_rates`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.error_rates import Draw, heavy, normal, study, whole
from mprun.study.compare.looks import Look, planned_looks
from mprun.study.compare.statistics import ALPHA, geometric_mean
from mprun.study.compare.times import SAME, judge_ratio

STUDIES = 2000
AT_MOST = ALPHA + 4 * math.sqrt(ALPHA * (1 - ALPHA) / STUDIES)
DRAWS = {
    "normal": (normal(1.0), 0.0),
    "heavy": (heavy(1.0), 0.0),
    "98 % of 10000": (whole(10_000, 0.98), 0.02),
    "97 % of 200": (whole(200, 0.97), 1.0),
    "90 % of 100": (whole(100, 0.9), 2.0),
}
PLANS: dict[object, Sequence[Look]] = {
    "looks": planned_looks(10),
    **{n: [Look(n, ALPHA)] for n in (2, 5)},
}


def shares(draw: Draw, floor: float, modes: int, mean: float, plan: object) -> tuple[float, float]:
    """The shares of studies with any mode called equivalent, and with any called different."""
    looks = PLANS[plan]
    drawn = draw(np.random.default_rng(20), (STUDIES, looks[-1].pairs, modes), mean)
    found = study(drawn, looks, floor)
    return float(found.equivalent.any(1).mean()), float(found.different.any(1).mean())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("modes", [1, 5])
@pytest.mark.parametrize("draw", DRAWS)
def test_false_claims_are_rare(draw: str, modes: int, plan: object) -> None:
    assert shares(*DRAWS[draw], modes, 1.0, plan)[0] <= AT_MOST  # all differ by the margin
    assert shares(*DRAWS[draw], modes, 0.0, plan)[1] <= AT_MOST  # all are equal


def test_the_rates_come_near_the_nominal_one() -> None:
    """They would be low too if nothing were ever said; one test of one mode uses up its 5 %."""
    at_least = ALPHA - 4 * math.sqrt(ALPHA * (1 - ALPHA) / STUDIES)
    assert at_least <= shares(normal(0.5), 0.0, 1, 1.0, 5)[0] <= AT_MOST
    assert at_least <= shares(normal(5.0), 0.0, 1, 0.0, 5)[1] <= AT_MOST  # too wide to be equal


@pytest.mark.parametrize("plan", ["looks", 5])
def test_what_is_equal_or_far_off_is_found(plan: object) -> None:
    assert shares(normal(0.3), 0.0, 1, 0.0, plan)[0] > 0.95
    assert shares(normal(0.3), 0.0, 1, 4.0, plan)[1] > 0.95


@pytest.mark.parametrize("seeds", [2, 3, 10])
@pytest.mark.parametrize(
    ("truth", "noise", "false"),
    [(1.0, 0.1, ("higher", "lower")), (SAME, 0.03, ("same",))],
    ids=["as fast", "5 % faster"],
)
def test_a_speed_is_seldom_claimed_falsely(
    truth: float, noise: float, false: tuple[str, ...], seeds: int
) -> None:
    ratios = truth * np.exp(np.random.default_rng(7).normal(0, noise, (STUDIES, seeds)))
    claims = sum(judge_ratio(geometric_mean(row)).word in false for row in ratios.tolist())
    assert claims / STUDIES <= AT_MOST
