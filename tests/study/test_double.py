"""Whether a batch is doubled, and the largest batch: by counted peaks, and by real steps over
made-up memories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.errors import UsageError
from mprun.study.double import PROOF_STEPS, TRY_STEPS, double, largest_size, largest_that_trains
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


@given(st.integers(1, 64), st.integers(64, 100_000), st.integers(64, 200_000))
def test_real_steps_find_it_and_a_margin_is_taken_off(start: int, room: int, limit: int) -> None:
    tried = []

    def fits(batch: int, steps: int) -> bool:
        tried.append((batch, steps))
        return batch <= room

    result = largest_that_trains(fits, start, limit, margin=0.1)
    largest = min(room, limit)
    assert result.is_limited_by_data == (limit <= room)
    # The last interval halved is at most a sixty-fourth of what fits.
    assert largest - max(1, largest // 64) <= result.size <= largest
    expected = result.size if result.is_limited_by_data else int(result.size * 0.9)
    assert result.recommended == max(start, expected)
    assert tried[-1] == (result.recommended, PROOF_STEPS)
    assert all(steps == TRY_STEPS for _, steps in tried[:-1])
    assert len(tried) < 40


def test_what_fits_a_few_steps_and_not_many_is_made_smaller() -> None:
    def fits(batch: int, steps: int) -> bool:
        return batch <= (1000 if steps == TRY_STEPS else 700)

    result = largest_that_trains(fits, 1, 10**6, margin=0.1)
    assert 600 < result.recommended <= 700
    assert 980 < result.size <= 1000


def test_where_not_even_the_first_batch_fits_the_message_says_so() -> None:
    with pytest.raises(UsageError, match=r"train\.batch_size=8 does not fit"):
        largest_that_trains(lambda batch, steps: False, 8, 100, 0.1)
    with pytest.raises(UsageError, match="fits for 3 steps and not for 20"):
        largest_that_trains(lambda batch, steps: steps == TRY_STEPS and batch == 8, 8, 100, 0.1)
