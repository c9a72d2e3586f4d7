"""Sums over what was alive: against counting every storage at every op."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.records.run_record import MEMORY_CATEGORIES
from mprun.watch.memory_recorder import LiveStorage, MemoryPoint, StepMemory

OWNERS = ("", "a", "a.b", "(inputs)", "(loss)")
KINDS = {"": "Net", "a": "Block", "a.b": "Linear", "(inputs)": "", "(loss)": ""}
OPS = 12


@st.composite
def storages(draw: st.DrawFn) -> LiveStorage:
    born = draw(st.integers(0, OPS))
    died = draw(st.none() | st.integers(born, OPS + 2))
    category, owner = draw(st.sampled_from(MEMORY_CATEGORIES)), draw(st.sampled_from(OWNERS))
    nbytes = draw(st.integers(0, 1000))
    return LiveStorage(nbytes, category, owner, born, (nbytes,), torch.uint8, died)


@given(held=st.lists(storages(), max_size=20), ops=st.integers(1, OPS))
def test_every_sum_is_that_of_what_is_alive(held: list[LiveStorage], ops: int) -> None:
    points = [MemoryPoint(f"op{n}", "forward" if n % 2 else "backward", "a") for n in range(ops)]
    found = StepMemory.of(held, points, KINDS)
    totals = []
    for n in range(ops):
        alive = [h for h in held if h.born <= n and (h.died is None or h.died > n)]
        totals.append(sum(h.nbytes for h in alive))
        for category in MEMORY_CATEGORIES:
            wanted = sum(h.nbytes for h in alive if h.category == category)
            assert found.timeline[category][n] == wanted
        assert sum(row[n] for row in found.timeline.values()) == totals[-1]
    assert found.peak_bytes == max(totals) == totals[found.peak_at]
    assert max(totals[: found.peak_at], default=-1) < found.peak_bytes  # the first such op
    assert found.peak_bytes == sum(found.categories.values())
    assert found.peak_bytes == sum(h.nbytes for h in found.peak_holds)
    assert all(a.nbytes >= b.nbytes for a, b in pairwise(found.peak_holds))
    for category in MEMORY_CATEGORIES:
        by_module = sum(row[category] for row in found.modules.values())
        assert by_module == found.categories[category]
    by_phase = {
        p: max(t for t, at in zip(totals, points, strict=True) if at.phase == p)
        for p in {at.phase for at in points}
    }
    assert found.phase_peaks == by_phase


def test_a_step_without_an_op_is_no_step() -> None:
    with pytest.raises(ValueError, match="no op ran"):
        StepMemory.of([], [], KINDS)
