"""What a ratio says: faster, the same, or how many more seeds would tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mprun.records.console.formatting import distinct_form
from mprun.study.compare.comparison import Estimate, Interval
from mprun.study.compare.statistics import geometric_mean
from mprun.study.compare.times import SAME, WIDE, RatioVerdict, judge_ratio


def interval_of(mean: float, sd: float, n: int) -> tuple[float, float]:
    """scipy's 95 % interval of logarithms of this mean and spread."""
    low, high = stats.t.interval(0.95, n - 1, mean, sd / math.sqrt(n))
    return float(low), float(high)


def test_two_seeds_that_disagree_tell_nothing() -> None:
    """0.53 times the throughput measured, between 0.01 and 31.32: the interval tells nothing."""
    logs = (math.log(0.01) + math.log(31.32)) / 2
    half = (math.log(31.32) - math.log(0.01)) / 2
    sd = half * math.sqrt(2) / float(stats.t.ppf(0.975, 1))
    found = judge_ratio(Estimate(math.exp(logs), Interval(0.01, 31.32), 2))
    assert (found.word, found.is_wide) == ("open", True)
    assert found.more_seeds is not None

    def tells(n: int) -> bool:
        low, high = interval_of(logs, sd, n)
        inside = low > -math.log(SAME) and high < math.log(SAME)
        return low > 0 or high < 0 or inside

    assert tells(2 + found.more_seeds)
    assert not tells(2 + found.more_seeds - 1)


@pytest.mark.parametrize(
    ("ratios", "word", "is_wide"),
    [
        ([2.0, 2.02, 1.98], "higher", False),
        ([0.5, 0.51, 0.49], "lower", False),
        ([1.0, 1.003, 0.998], "same", False),
        ([1.0, 1.05, 0.97], "open", False),
        ([3.0, 3.5], "higher", True),
        ([1.9, 0.7], "open", True),
        ([1.2, 1.2], "higher", False),
    ],
)
def test_a_word_for_each_case(ratios: list[float], word: str, is_wide: bool) -> None:
    found = judge_ratio(geometric_mean(ratios))
    assert (found.word, found.is_wide) == (word, is_wide)
    assert (found.more_seeds is None) == (word != "open" and not is_wide)


def test_without_an_interval_nothing_is_known() -> None:
    assert judge_ratio(Estimate(2.0, None, 1)) == RatioVerdict("open", True, None)


def test_the_number_of_seeds_makes_a_wide_interval_narrow() -> None:
    ratios = [3.0, 3.5]
    more = judge_ratio(geometric_mean(ratios)).more_seeds
    assert more is not None
    logs = np.log(ratios)
    for n, is_narrow in ((2 + more, True), (1 + more, False)):
        low, high = interval_of(float(logs.mean()), float(logs.std(ddof=1)), n)
        assert ((high - low) / 2 <= math.log(WIDE)) == is_narrow


def test_a_ratio_of_all_but_one_is_settled_by_no_number_of_seeds_within_reason() -> None:
    assert judge_ratio(geometric_mean([SAME * 8, SAME / 8])).more_seeds is None


FORMS = tuple(f"{{:+.{digits}g}}" for digits in range(3, 18))


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3),
    st.lists(st.sampled_from([-0.5, 0.0, 0.5, 1.0]), min_size=1, max_size=3),
)
def test_rounding_moves_no_figure_across_a_limit(values: list[float], limits: list[float]) -> None:
    form = distinct_form(values, limits, FORMS)
    for value in values:
        shown = float(form.format(value))
        for limit in limits:
            assert (shown > limit, shown < limit) == (value > limit, value < limit)
