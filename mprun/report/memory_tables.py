"""The memory of a step on the terminal, modes side by side: by category, and by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mprun.records.run_record import MEMORY_CATEGORIES

CATEGORIES = {name: name for name in MEMORY_CATEGORIES} | {"optimizer_state": "optimizer"}
"""The categories of `memory.json`, and what they are called where people read them."""

SHORT = dict(
    zip(CATEGORIES, ("params", "buffers", "grads", "optim.", "activ.", "temp."), strict=True)
)
"""The same for narrow columns."""

MODULES = 20
"""Modules shown; the rest are summed in one row."""

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def unit_for(size: int) -> str:
    """The unit in which an amount of this size has a readable number of digits."""
    return next((unit for unit, factor in UNITS.items() if size >= 4 * factor), "B")


def amount(size: int) -> str:
    """An amount of memory with its unit: 1 GiB, 55.2 MiB."""
    unit = next((unit for unit, factor in UNITS.items() if size >= factor), "B")
    return f"{size / UNITS[unit]:,.1f}".removesuffix(".0") + f" {unit}"


def percent(ratio: float) -> str:
    """A ratio as a change: `-28 %`, or `x12` from tenfold on."""
    change = round((ratio - 1) * 100)
    return f"x{ratio:,.0f}" if ratio >= 10 else f"{change:+d} %" if change else "0 %"


def category_table(found: Mapping[str, Any]) -> Table:
    """A row for each category, a column for each mode, with the change against the first."""
    modes = found["modes"]
    unit = unit_for(max(mode["bytes"]["peak"] for mode in modes))
    table = _table(f"one training step at its peak, {unit}", "", no_wrap=True)
    for mode in modes:
        table.add_column(mode["label"], justify="right", overflow="fold")
    for key, name in CATEGORIES.items():
        if any(mode["bytes"][key] for mode in modes):
            table.add_row(name, *_cells([mode["bytes"][key] for mode in modes], unit))
    table.add_section()
    table.add_row("peak", *_cells([mode["bytes"]["peak"] for mode in modes], unit), style="bold")
    table.add_row("reached in", *(_place(mode["peak_at"]) for mode in modes))
    for phase in ("forward", "backward", "optimizer"):
        peaks = [mode["phase_peaks"].get(phase) for mode in modes]
        if any(peaks):
            table.add_row(f"peak of {phase}", *_cells(peaks, unit))
    if found["limit_bytes"] is not None:
        table.add_section()
        fits = (_fit(mode["fits"]) for mode in modes)
        table.add_row(f"largest batch in {found['limit']}", *fits)
    return table


def module_table(mode: Mapping[str, Any], first: Mapping[str, Any], depth: int | None) -> Table:
    """A row for each module with what it holds at the peak, and the change against `first`'s.

    Args:
        mode: a mode of `memory.json`.
        first: the mode it is set against; itself for none.
        depth: modules are shown down to this depth; None for all.
    """
    rows, before = _by_depth(mode["modules"], depth), _by_depth(first["modules"], depth)
    kept = [key for key in CATEGORIES if any(row[key] for row in rows.values())]
    unit = unit_for(first["bytes"]["peak"])
    table = _table(f"{mode['label']} by module, {unit}", "module")
    for name in (*(SHORT[key] for key in kept), "all"):
        table.add_column(name, justify="right", no_wrap=True)
    if mode is not first:
        table.add_column("change", justify="right", no_wrap=True)
    for path, row in _largest(rows):
        cells = [_number(row[key], unit) if row[key] else "" for key in (*kept, "total")]
        if mode is not first:
            same = before.get(path)
            cells.append(percent(row["total"] / same["total"]) if same else "")
        table.add_row(path or "(root)", *cells)
    return table


def _table(title: str, column: str, no_wrap: bool = False) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column(column, overflow="fold", min_width=11, no_wrap=no_wrap)
    return table


def _by_depth(modules: Sequence[Mapping[str, Any]], depth: int | None) -> dict[str, dict[str, int]]:
    """Path to bytes by category and in total, what lies deeper than `depth` added up."""
    found: dict[str, dict[str, int]] = {}
    for module in modules:
        path = ".".join(module["module"].split(".")[:depth])
        row = found.setdefault(path, dict.fromkeys((*CATEGORIES, "total"), 0))
        for key in row:
            row[key] += module[key]
    return found


def _largest(rows: Mapping[str, dict[str, int]]) -> Iterator[tuple[str, dict[str, int]]]:
    """The `MODULES` rows that hold most, in their order, and the sum of the others."""
    by_size = sorted(rows, key=lambda path: -rows[path]["total"])
    shown = {*by_size} if len(rows) <= MODULES + 1 else {*by_size[:MODULES]}
    yield from ((path, row) for path, row in rows.items() if path in shown)
    if rest := [row for path, row in rows.items() if path not in shown]:
        yield f"{len(rest)} more", {key: sum(row[key] for row in rest) for key in rest[0]}


def _cells(sizes: Sequence[int | None], unit: str) -> Iterator[str]:
    """Each amount, with its change against the first where there is one; `-` for None."""
    for n, size in enumerate(sizes):
        if size is None:
            yield "-"
            continue
        first = sizes[0]
        change = f" ({percent(size / first)})" if n and first and size != first else ""
        yield f"{_number(size, unit)}{change}"


def _number(size: int, unit: str) -> str:
    """An amount in a unit, with the digits a reader has use for."""
    value = size / UNITS[unit]
    return f"{value:,.2f}" if value < 1000 and unit != "B" else f"{value:,.0f}"


def _place(at: Mapping[str, Any]) -> str:
    return f"{at['op']}, {at['module'] or '(root)'}, {at['phase']}"


def _fit(fit: Mapping[str, Any]) -> str:
    if not fit["batch_size"]:
        return f"none: 1 needs {amount(fit['tried']['1'])}"
    gain = f" (x{fit['ratio']:.2f})" if fit["ratio"] not in (None, 1.0) else ""
    return f"{fit['batch_size']:,}{gain}"
