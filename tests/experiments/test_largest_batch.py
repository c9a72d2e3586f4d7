"""The search for the largest batch that fits, over made-up memories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.errors import UsageError
from mprun.experiments.largest_batch import PROOF_STEPS, TRY_STEPS, largest_that_fits


@given(st.integers(1, 64), st.integers(64, 100_000), st.integers(64, 200_000))
def test_it_is_found_and_a_margin_is_kept(start: int, room: int, limit: int) -> None:
    tried = []

    def fits(batch: int, steps: int) -> bool:
        tried.append((batch, steps))
        return batch <= room

    found = largest_that_fits(fits, start, limit, margin=0.1)
    largest = min(room, limit)
    assert found.is_limited_by_data == (limit <= room)
    # The last interval halved is at most a sixty-fourth of what fits.
    assert largest - max(1, largest // 64) <= found.found <= largest
    kept = found.found if found.is_limited_by_data else int(found.found * 0.9)
    assert found.recommended == max(start, kept)
    assert tried[-1] == (found.recommended, PROOF_STEPS)
    assert all(steps == TRY_STEPS for _, steps in tried[:-1])
    assert len(tried) < 40


def test_what_fits_a_few_steps_and_not_many_is_made_smaller() -> None:
    def fits(batch: int, steps: int) -> bool:
        return batch <= (1000 if steps == TRY_STEPS else 700)

    found = largest_that_fits(fits, 1, 10**6, margin=0.1)
    assert 600 < found.recommended <= 700
    assert 980 < found.found <= 1000


def test_nothing_fits() -> None:
    with pytest.raises(UsageError, match=r"train\.batch_size=8 does not fit"):
        largest_that_fits(lambda batch, steps: False, 8, 100, 0.1)
    with pytest.raises(UsageError, match="fits for 3 steps and not for 20"):
        largest_that_fits(lambda batch, steps: steps == TRY_STEPS and batch == 8, 8, 100, 0.1)
