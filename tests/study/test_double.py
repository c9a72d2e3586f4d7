"""Whether a batch is doubled, and the largest batch by counted peaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.study.double import double, largest_size
from tests.study import comparison, variant


def test_faster_and_as_good_is_doubled_with_the_best_rule() -> None:
    found = double(
        comparison(
            variant("x2", metric=0.91),
            variant("x2 linear", metric=0.92),
            variant("x2 sqrt", "worse", metric=0.93),
        )
    )
    assert found.answer == "double it"
    assert found.reason.startswith("x2 linear: 2.00 [1.90, 2.10] of the base batch's samples")


def test_of_losses_the_lowest_is_best() -> None:
    rows = comparison(variant("a", metric=0.5), variant("b", metric=0.4), higher_is_better=False)
    assert double(rows).reason.startswith("b: ")


def test_no_faster_is_not_doubled() -> None:
    slow = (0.9, 0.8, 1.0)
    found = double(comparison(variant("a", throughput=slow), variant("b", throughput=slow)))
    assert found.answer == "don't"
    assert found.reason.startswith("it is no faster: 0.90 [0.80, 1.00]")


def test_worse_with_every_rule_is_not_doubled() -> None:
    failed = double(comparison(variant("a", "worse", throughput=None)))
    assert failed.answer == "don't"
    found = double(comparison(variant("a", "worse"), variant("b", "worse")))
    assert found.answer == "don't"
    assert "worse with every learning-rate rule" in found.reason


def test_what_cannot_be_told_is_not_told() -> None:
    undecided = double(comparison(variant("a", "worse"), variant("b", "inconclusive")))
    assert undecided.answer == "inconclusive"
    noisy = double(comparison(variant("a", throughput=(1.1, 0.9, 1.3))))
    assert noisy.answer == "inconclusive"
    unknown = double(comparison(variant("a", throughput=None)))
    assert (unknown.answer, unknown.reason) == (
        "inconclusive",
        "no step was timed, the runs are too short",
    )
    assert double(comparison()).answer == "inconclusive"
    emulated = double(comparison(variant("a", throughput=None, execution="emulated")))
    assert emulated.answer == "inconclusive"
    assert "emulated" in emulated.reason


# ---- the largest batch ---------------------------------------------------------------------------

LINES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**7)), min_size=1, max_size=4)


@given(lines=LINES, limit=st.integers(1, 10**10), start=st.integers(1, 10**5))
def test_the_size_found_fits_and_the_next_does_not(
    lines: list[tuple[int, int]], limit: int, start: int
) -> None:
    """A step's peak is the largest of several moments, each a line in the batch size."""

    def peak(size: int) -> int:
        return max(size + slope * size + fixed for slope, fixed in lines)

    result = largest_size(peak, limit, start, limit)
    assert result.size == 0 or result.tried[result.size] <= limit
    assert peak(result.size + 1) > limit
    assert result.grows
    assert len(result.tried) < 80  # bisection alone: 34 up and 34 down


def test_a_peak_that_does_not_grow_is_reported() -> None:
    result = largest_size(lambda size: 1000 - size, 150, 16, 150)
    assert not result.grows


@pytest.mark.parametrize("start", [1, 12, 10**9])
def test_sizes_beyond_the_limit_are_not_tried(start: int) -> None:
    result = largest_size(lambda size: 5, 1000, start, 1000)
    assert result.size == 1000
    assert max(result.tried) == 1000
