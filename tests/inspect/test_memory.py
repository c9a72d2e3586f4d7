"""The memory of a step on the terminal and as a picture, from figures made by hand."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from typing import Any

import matplotlib.image
import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mprun.inspect.measurement_plots import SHADED, memory_plot, thinned
from mprun.inspect.memory import (
    NAMES,
    MemoryRecord,
    ModeMemory,
    category_table,
    module_table,
)
from mprun.records.console import print_table
from mprun.records.console.fitted_table import FittedTable
from mprun.records.run_record import MEMORY_CATEGORIES
from mprun.study.report.canvas import MEMORY
from mprun.watch.step_events import PHASES

MIB = 2**20


def row(module: str, **sizes: int) -> dict[str, Any]:
    held = {key: sizes.get(key, 0) * MIB for key in MEMORY_CATEGORIES}
    return {"module": module, "kind": "Linear", "total": sum(held.values()), **held}


def mode(label: str, scale: int, ratio: float, ops: int = 4, **changes: Any) -> ModeMemory:
    """A mode with 8 MiB times `scale`, and 2 more, at its peak."""
    modules = changes.pop("modules", None) or [
        row("a.b", parameters=4 * scale, gradients=4 * scale),
        row("(inputs)", activations=2),
    ]
    sizes = {key: sum(m[key] for m in modules) for key in MEMORY_CATEGORIES}
    peak = sum(sizes.values())
    half = [size // 2 for size in sizes.values()]
    timeline = {
        key: [half[n] if op != ops // 2 else sizes[key] for op in range(ops)]
        for n, key in enumerate(MEMORY_CATEGORIES)
    }
    phases = ["forward"] * (ops // 2) + ["backward"] * (ops - ops // 2)
    content = {
        "label": label,
        "precision": "fp32",
        "policy": {},
        "batch": {"micro": 8, "accumulate": 1, "effective": 8, "base": 8, "lr_rule": "none"},
        "optimizer": {"name": "adam", "impl": "forloop"},
        "memory_format": "contiguous",
        "ratio": ratio,
        "largest": [],
        "bytes": {"peak": peak, **sizes},
        "peak_at": {"point": ops // 2, "op": "mm", "module": "a.b", "phase": "backward"},
        "phase_peaks": {"forward": peak // 2, "backward": peak},
        "modules": modules,
        "timeline": {
            "op": ["mm"] * ops,
            "phase": phases,
            "module": ["a.b"] * ops,
            **timeline,
        },
        "fits": fits(1234 * scale, float(scale), MIB),
    }
    return msgspec.convert({**content, **changes}, ModeMemory)


def fits(batch_size: int, ratio: float | None, one: int) -> dict[str, Any]:
    peaks = {"peak_bytes": None, "next_peak_bytes": None, "tried": {"1": one}}
    return {"batch_size": batch_size, **peaks, "grows": True, "ratio": ratio}


def record(*modes: ModeMemory, limit: str | None = None) -> MemoryRecord:
    limit_bytes = None if limit is None else 2**30
    return MemoryRecord(1, "mnist", "cpu", {}, "fp32", limit, limit_bytes, None, list(modes))


def shown(table: FittedTable) -> str:
    console = Console(file=io.StringIO())
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(table: FittedTable) -> list[list[str]]:
    """Its rows, each split at two spaces or more."""
    return [
        [x.strip() for x in line.strip().split("  ") if x.strip()]
        for line in shown(table).splitlines()
        if line.strip()
    ]


def test_names_are_those_of_the_counter() -> None:
    assert tuple(NAMES) == MEMORY_CATEGORIES
    assert len(MEMORY) == len(MEMORY_CATEGORIES)
    assert set(SHADED) < set(PHASES)


def test_categories_side_by_side() -> None:
    rows = lines(category_table(record(mode("fp32", 2, 1.0), mode("half", 1, 0.56), limit="1GiB")))
    assert ["fp32", "half"] in rows
    assert ["parameters", "8.00", "4.00 (-50 %)"] in rows
    assert ["activations", "2.00", "2.00"] in rows
    assert ["peak", "18.00", "10.00 (-44 %)"] in rows
    assert ["reached in", "mm, a.b, backward", "mm, a.b, backward"] in rows
    assert ["peak of forward", "9.00", "5.00 (-44 %)"] in rows
    assert ["largest batch in 1GiB", "2,468 (x2.00)", "1,234"] in rows
    assert not [r for r in rows if r[0] in ("buffers", "temporary", "peak of optimizer")]


def test_modules_against_those_of_the_first_mode() -> None:
    first, second = mode("fp32", 2, 1.0), mode("half", 1, 0.5)
    assert ["a.b", "8.00", "8.00", "16.00"] in lines(module_table(first, first))
    rows = lines(module_table(second, first))
    assert ["a.b", "4.00", "4.00", "8.00", "-50 %"] in rows
    assert ["(inputs)", "2.00", "2.00", "0 %"] in rows


# ---- the picture ---------------------------------------------------------------------------------


def test_a_picture_in_two_formats() -> None:
    modes = [mode("fp32", 2, 1.0), mode("half", 1, 0.56), mode("other", 3, 1.5), mode("x", 1, 0.5)]
    files = memory_plot(record(*modes))
    assert list(files) == ["memory.png", "memory.svg"]
    image = matplotlib.image.imread(io.BytesIO(files["memory.png"]))
    colours = {tuple(c) for c in (image[..., :3] * 255).round().astype(int).reshape(-1, 3)[::3]}
    for category in ("parameters", "gradients", "activations"):
        colour = MEMORY[MEMORY_CATEGORIES.index(category)]
        wanted = tuple(int(colour[n : n + 2], 16) for n in (1, 3, 5))
        assert wanted in colours, category
    text = files["memory.svg"].decode()
    ElementTree.fromstring(text)
    assert "Memory during one training step of mnist on" in text
    assert "Bytes alive after each op of the step, by category" in text
    for word in ("half: -44 %", "10 MiB", "mm, a.b", "forward", "backward", "op of the step"):
        assert word in text


def test_a_step_of_many_ops_is_drawn_by_its_largest() -> None:
    files = memory_plot(record(mode("fp32", 1, 1.0, ops=30_000)))
    assert len(files["memory.svg"]) < 2**20


@given(
    rows=st.integers(1, 3).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=1, max_size=40
        )
    ),
    points=st.integers(1, 10),
)
def test_thinning_keeps_the_largest_of_each_stretch(rows: list[list[int]], points: int) -> None:
    columns = np.array(rows).T
    shown = thinned(columns.tolist(), points)
    assert 1 <= len(shown) <= points
    assert shown == sorted(shown)
    totals = columns.sum(axis=0)
    assert max(totals[shown]) == max(totals)
    if len(rows) <= points:
        assert shown == list(range(len(rows)))
