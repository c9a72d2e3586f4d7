"""Sums over what was alive: against counting every storage at every op."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.records.run_record import MEMORY_CATEGORIES, MemoryPeak, ModuleMemory, StorageMemory
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


def test_as_recorded() -> None:
    held = [
        LiveStorage(4, "parameters", "a", 0, (2, 1), torch.bfloat16),
        LiveStorage(8, "activations", "(inputs)", 1, (2,), torch.float32, 2),
    ]
    points = [
        MemoryPoint("mm", "forward", "a"),
        MemoryPoint("sum", "other", "(loss)"),
        MemoryPoint("t", "other", ""),
    ]
    step = StepMemory.of(held, points, KINDS)
    assert step.totals == {
        "peak": 12,
        "parameters": 4,
        "buffers": 0,
        "gradients": 0,
        "optimizer_state": 0,
        "activations": 8,
        "temporary": 0,
    }
    assert step.peak == MemoryPeak(1, "sum", "other", "(loss)")
    assert step.phase_peaks == {"forward": 4, "other": 12}
    assert step.module_rows() == [
        ModuleMemory("a", "Block", 4, 4, 0, 0, 0, 0, 0),
        ModuleMemory("(inputs)", "", 8, 0, 0, 0, 0, 8, 0),
    ]
    assert step.largest(1) == [StorageMemory(8, "activations", "(inputs)", [2], "float32")]
    assert msgspec.to_builtins(step.timeline_rows()) == {
        "op": ["mm", "sum", "t"],
        "phase": ["forward", "other", "other"],
        "module": ["a", "(loss)", ""],
        "parameters": [4, 4, 4],
        "buffers": [0, 0, 0],
        "gradients": [0, 0, 0],
        "optimizer_state": [0, 0, 0],
        "activations": [0, 8, 0],
        "temporary": [0, 0, 0],
    }


def test_a_step_without_an_op_is_no_step() -> None:
    with pytest.raises(ValueError, match="no op ran"):
        StepMemory.of([], [], KINDS)
