"""A batch is cut into one part per process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mprun.data.batches import WHOLE, BatchSplit


@given(size=st.integers(0, 10_000), of=st.integers(1, 64))
def test_parts_are_a_partition_of_like_sizes(size: int, of: int) -> None:
    parts = [BatchSplit(rank, of).rows(size) for rank in range(of)]
    assert [i for first, end in parts for i in range(first, end)] == list(range(size))
    sizes = [end - first for first, end in parts]
    assert max(sizes) - min(sizes) <= 1


def test_one_process_takes_the_whole() -> None:
    assert WHOLE.rows(7) == (0, 7)
