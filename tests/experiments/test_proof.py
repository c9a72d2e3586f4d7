"""Trainings in pairs: intervals equal scipy's, verdicts follow from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from mprun.compare.verdicts import Criterion
from mprun.experiments.proof import PairedResult, compare_trainings

BASE = [1.0, 1.2, 0.9, 1.1]


def losses(other: list[float], margin: float, base: list[float] = BASE) -> PairedResult:
    return compare_trainings(other, base, Criterion("validation", "loss", margin, True, 0.0, False))


def shifted(*shares: float) -> list[float]:
    """Losses that differ from `BASE` by shares of its mean."""
    mean = sum(BASE) / len(BASE)
    return [b + share * mean for b, share in zip(BASE, shares, strict=True)]


def test_difference_and_intervals_are_scipys_of_paired_differences() -> None:
    other = [1.01, 1.23, 0.95, 1.08]
    result = losses(other, 0.02)
    differences = (np.array(other) - np.array(BASE)) / np.mean(BASE)
    assert result.difference.value == pytest.approx(differences.mean())
    assert result.difference.n == 4
    for interval, confidence in ((result.difference.interval, 0.95), (result.equivalence, 0.90)):
        expected = stats.ttest_1samp(differences, 0).confidence_interval(confidence)
        assert interval == pytest.approx((expected.low, expected.high))


def test_equivalent_is_two_one_sided_tests() -> None:
    """The 90 % interval lies inside the margin exactly where both tests at 5 % reject."""
    shares = [0.004, -0.006, 0.010, 0.002]
    for margin in np.linspace(0.005, 0.03, 11):
        tests = [
            stats.ttest_1samp(shares, -margin, alternative="greater").pvalue,
            stats.ttest_1samp(shares, margin, alternative="less").pvalue,
        ]
        word = losses(shifted(*shares), margin).verdict.word
        assert (word == "equivalent") == (max(tests) < 0.05)


@pytest.mark.parametrize(
    ("shares", "word"),
    [
        ([0.0, 0.0, 0.0, 0.0], "equivalent"),
        ([0.001, -0.001, 0.002, 0.0], "equivalent"),
        ([0.05, 0.06, 0.05, 0.04], "worse"),
        ([-0.05, -0.06, -0.05, -0.04], "better"),
        ([0.05, -0.06, 0.04, 0.01], "inconclusive"),
    ],
)
def test_a_verdict_for_each_case(shares: list[float], word: str) -> None:
    assert losses(shifted(*shares), 0.02).verdict.word == word


def test_an_inconclusive_verdict_has_how_many_more_seeds_would_settle_it() -> None:
    shares = [0.02, -0.02, 0.02, -0.02]
    more = losses(shifted(*shares), 0.02).verdict.more_seeds
    assert more is not None
    spread, n = stats.tstd(shares), 4 + more
    half = [stats.t.ppf(0.95, k - 1) * spread / math.sqrt(k) for k in (n - 1, n)]
    assert half[0] >= 0.02 > half[1]


def test_a_difference_right_at_the_margin_is_settled_by_no_number_of_seeds_within_reason() -> None:
    shares = [0.3, -0.3, 0.3, -0.2999]
    assert losses(shifted(*shares), 1e-5).verdict.more_seeds is None


def test_one_pair_has_no_interval() -> None:
    result = losses([1.1], 0.2, [1.0])
    assert result.difference.value == pytest.approx(0.1)
    assert (result.difference.interval, result.equivalence) == (None, None)
    assert result.verdict.word == "inconclusive"
    assert "a spread needs two" in result.verdict.reason


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_training_that_failed_is_worse_than_any(broken: float) -> None:
    result = losses([1.0, broken, 0.9, 1.1], 0.5)
    assert result.verdict.word == "worse"
    assert result.verdict.reason.startswith("1 of 4 trainings")
    assert math.isnan(result.difference.value)


def test_the_direction_is_the_metric_s() -> None:
    higher, lower = [25.0, 24.9, 25.1], [20.0, 20.1, 19.9]
    for more_is_better, word in ((True, "better"), (False, "worse")):
        criterion = Criterion("validation", "bleu", 0.02, True, 0.0, more_is_better)
        assert compare_trainings(higher, lower, criterion).verdict.word == word


def test_accuracies_are_compared_as_they_are_and_more_is_better() -> None:
    criterion = Criterion("validation", "accuracy", 0.005, False, 0.0, True)
    base = [0.91, 0.90, 0.92]
    result = compare_trainings([0.93, 0.921, 0.939], base, criterion)
    assert result.difference.value == pytest.approx(0.02)
    assert result.verdict.word == "better"
    assert compare_trainings([0.89, 0.879, 0.901], base, criterion).verdict.word == "worse"
    assert compare_trainings([0.911, 0.90, 0.92], base, criterion).verdict.word == "equivalent"


def test_losses_below_zero_are_better_the_lower_and_a_mean_of_zero_has_no_share() -> None:
    assert losses([-1.3, -1.1, -1.21], 0.02, [-1.2, -1.0, -1.1]).verdict.word == "better"
    assert losses([0.5, 0.6], 0.02, [-0.5, 0.5]).difference.value == pytest.approx(0.55)
