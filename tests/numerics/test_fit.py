"""The search for the largest batch: it finds what trying every size finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.numerics.fit import largest

LINES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**7)), min_size=1, max_size=4)


@given(lines=LINES, limit=st.integers(1, 10**10), start=st.integers(1, 10**5))
def test_the_size_found_fits_and_the_next_does_not(
    lines: list[tuple[int, int]], limit: int, start: int
) -> None:
    """A step's peak is the largest of several moments, each a line in the batch size."""

    def peak(size: int) -> int:
        return max(size + slope * size + fixed for slope, fixed in lines)

    fit = largest(peak, limit, start)
    assert fit.size == 0 or fit.tried[fit.size] <= limit
    assert peak(fit.size + 1) > limit
    assert fit.grows
    assert len(fit.tried) < 80  # bisection alone: 34 up and 34 down


def test_a_straight_line_takes_four_sizes() -> None:
    fit = largest(lambda size: 10**6 + 1000 * size, 16 * 2**30, 12)
    assert fit.size == (16 * 2**30 - 10**6) // 1000
    assert len(fit.tried) == 4


def test_where_nothing_fits_the_size_is_none() -> None:
    fit = largest(lambda size: 10**6 + size, 1000, 64)
    assert fit.size == 0
    assert fit.tried[1] > 1000


def test_a_peak_that_does_not_grow_is_said() -> None:
    fit = largest(lambda size: 1000 - size, 150, 16)
    assert not fit.grows


@pytest.mark.parametrize("start", [1, 12, 10**9])
def test_sizes_beyond_the_limit_are_not_tried(start: int) -> None:
    fit = largest(lambda size: 5, 1000, start)
    assert fit.size == 1000
    assert max(fit.tried) == 1000
