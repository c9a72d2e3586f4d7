"""Intervals and tests against scipy.stats, over drawn data, and the cases it has no answer for."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from mprun.study.compare.comparison import Interval
from mprun.study.compare.statistics import (
    ALPHA,
    MAX_SEEDS,
    Sample,
    difference_p,
    equivalence_p,
    estimate,
    geometric_mean,
    holm,
    interval,
    seeds_to_settle,
    summarise,
)

# Sums of a few float64 numbers in another order, and their square roots, agree to some 1e-13 of the
# largest number drawn (1e3); t's quantiles and tails are the same functions of scipy's.
CLOSE = {"rel_tol": 1e-9, "abs_tol": 1e-9}
ACCURACIES = st.integers(0, 10_000).map(lambda hits: hits / 10_000)
NUMBERS = st.floats(-1e3, 1e3)


@st.composite
def pairs(draw: st.DrawFn, numbers: st.SearchStrategy[float] = NUMBERS) -> list[list[float]]:
    """Two lists of equal length, whose differences vary by more than rounding does."""
    n = draw(st.integers(2, 30))
    a, b = (draw(st.lists(numbers, min_size=n, max_size=n)) for _ in range(2))
    differences = np.subtract(b, a)
    assume(np.std(differences) > 1e-6 * max(1e-3, np.abs([a, b]).max()))
    return [a, b]


def differences(found: list[list[float]]) -> list[float]:
    return [y - x for x, y in zip(*found, strict=True)]


@given(pairs() | pairs(ACCURACIES))
def test_the_paired_test_is_scipys(found: list[list[float]]) -> None:
    a, b = found
    expected = float(stats.ttest_rel(b, a).pvalue)
    assert math.isclose(difference_p(summarise(differences(found))), expected, **CLOSE)


@given(pairs() | pairs(ACCURACIES), st.floats(1e-4, 1e3))
def test_equivalence_is_scipys_two_one_sided_tests(found: list[list[float]], margin: float) -> None:
    drawn = differences(found)
    below = stats.ttest_1samp(drawn, margin, alternative="less").pvalue
    above = stats.ttest_1samp(drawn, -margin, alternative="greater").pvalue
    assert math.isclose(equivalence_p(summarise(drawn), margin), max(below, above), **CLOSE)


@given(pairs(), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_intervals_are_scipys(found: list[list[float]], level: float) -> None:
    drawn = differences(found)
    n, error = len(drawn), stats.sem(drawn)
    expected = stats.t.interval(level, n - 1, loc=np.mean(drawn), scale=error)
    ours = interval(summarise(drawn), level)
    assert ours is not None
    for x, y in zip(ours, expected, strict=True):
        assert math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-7)  # the quantile of n = 2 is up to 64


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=20))
def test_ratios_are_averaged_as_logarithms(ratios: list[float]) -> None:
    found = geometric_mean(ratios)
    logs = np.log(ratios)
    assert math.isclose(found.value, stats.gmean(ratios), rel_tol=1e-9)
    assume(logs.std() > 1e-9)
    ends = stats.t.interval(0.95, len(logs) - 1, loc=logs.mean(), scale=stats.sem(logs))
    assert found.interval is not None
    for ours, theirs in zip(found.interval, ends, strict=True):
        assert math.isclose(math.log(ours), min(theirs, 709), rel_tol=1e-9, abs_tol=1e-9)


# ---- few numbers, and numbers without spread -----------------------------------------------------


def test_one_number_has_a_mean_and_nothing_else() -> None:
    sample = summarise([0.25])
    assert estimate(sample) == (0.25, None, 1)
    assert geometric_mean([2.0]) == (2.0, None, 1)
    assert seeds_to_settle(sample, 0.005) is None


@pytest.mark.parametrize(
    ("mean", "equivalent", "different"), [(0.0, 0.0, 1.0), (0.001, 0.0, 0.0), (-0.02, 1.0, 0.0)]
)
def test_without_any_spread_the_mean_is_certain(
    mean: float, equivalent: float, different: float
) -> None:
    sample = summarise([mean] * 3)
    assert interval(sample) == Interval(mean, mean)
    assert (equivalence_p(sample, 0.005), difference_p(sample)) == (equivalent, different)


def test_on_the_margin_exactly_is_not_inside() -> None:
    assert equivalence_p(summarise([0.5, 0.5]), 0.5) == 0.5


def test_differences_that_agree_by_chance_have_the_spread_of_their_rounding() -> None:
    """Two runs 3 samples of 100 apart, twice: no certainty, though scipy's p-value is 0."""
    sample = summarise([0.03, 0.03], resolution=0.01)
    assert sample.sd == 0.01 / math.sqrt(12)
    assert 0.02 < difference_p(sample) < 0.05
    assert difference_p(summarise([0.02, 0.02], resolution=0.01)) > 0.05


# ---- several tests -------------------------------------------------------------------------------


def test_holm_on_a_case_worked_by_hand() -> None:
    # sorted 0.01, 0.02, 0.03, 0.6: times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.6
    assert holm([0.03, 0.01, 0.6, 0.02]) == pytest.approx([0.06, 0.04, 0.6, 0.06])
    assert holm([]) == []
    assert holm([0.3]) == [0.3]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), max_size=12), st.sampled_from([0.01, 0.05, 0.2]))
def test_holm_rejects_what_the_step_down_procedure_rejects(
    p_values: list[float], alpha: float
) -> None:
    """Holm (1979): go up from the smallest; stop at the first p above alpha / (those left)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    rejected = set()
    for rank, index in enumerate(order):
        bound = alpha / (len(order) - rank)
        assume(not math.isclose(p_values[index], bound, rel_tol=1e-12))
        if p_values[index] > bound:
            break
        rejected.add(index)
    adjusted = holm(p_values)
    assert {i for i, p in enumerate(adjusted) if p <= alpha} == rejected


# ---- how many more -------------------------------------------------------------------------------


def is_settled(sample: Sample, margin: float, n: int) -> bool:
    """By the tests themselves, were there n numbers of this mean and spread."""
    more = Sample(n, sample.mean, sample.sd)
    return equivalence_p(more, margin) <= ALPHA or difference_p(more) <= ALPHA


@given(st.integers(2, 40), st.floats(-0.02, 0.02), st.floats(1e-5, 0.05), st.floats(0.001, 0.01))
def test_the_further_seeds_are_the_fewest_that_settle_it(
    n: int, mean: float, sd: float, margin: float
) -> None:
    sample = Sample(n, mean, sd)
    assume(not is_settled(sample, margin, n))
    found = seeds_to_settle(sample, margin)
    if found is None:
        assert not is_settled(sample, margin, n + MAX_SEEDS)
    else:
        assert is_settled(sample, margin, n + found)
        assert found == 1 or not is_settled(sample, margin, n + found - 1)


def test_a_spread_that_a_thousand_seeds_would_not_overcome_has_no_number() -> None:
    assert seeds_to_settle(Sample(3, 0.00001, 10.0), 0.005) is None


def test_stricter_levels_need_more() -> None:
    sample = Sample(3, 0.001, 0.01)
    found = [seeds_to_settle(sample, 0.005, ALPHA / k, ALPHA / k) or 0 for k in (1, 3, 8)]
    assert all(a < b for a, b in pairwise(found))
