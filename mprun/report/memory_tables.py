"""The memory of a step on the terminal, modes side by side: by category, and by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mprun.console.fitted_table import (
    ALWAYS,
    HARD_BLANK,
    FittedTable,
    TableColumn,
    figure_column,
    text_column,
)
from mprun.records.memory_record import LargestBatch, MemoryRecord, ModeMemory
from mprun.records.run_record import MEMORY_CATEGORIES

NAMES = {
    "parameters": ("parameters", "params"),
    "buffers": ("buffers", "buffers"),
    "gradients": ("gradients", "grads"),
    "optimizer_state": ("optimizer", "optim."),
    "activations": ("activations", "activ."),
    "temporary": ("temporary", "temp."),
}
"""A category's name, and its short form for narrow columns."""

MODULES = 20
"""The most modules shown; the rest are summed in one row."""

IMPORTANCE = (
    *("buffers", "temporary", "gradients"),
    *("parameters", "optimizer_state", "activations"),
)
"""Categories in the order in which a narrow table leaves them out."""

MODE_WIDTH = 14
"""The least width of a mode's column: an amount and its change."""

ELSEWHERE = "memory.json"

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def unit_for(size: int) -> str:
    """The unit in which an amount of this size has a readable number of digits."""
    return next((unit for unit, factor in UNITS.items() if size >= 4 * factor), "B")


def amount(size: int) -> str:
    """An amount of memory with its unit: 1 GiB, 55.2 MiB."""
    unit = next((unit for unit, factor in UNITS.items() if size >= factor), "B")
    return f"{size / UNITS[unit]:,.1f}".removesuffix(".0") + f" {unit}"


def change_text(ratio: float) -> str:
    """A ratio as a change: `-28 %`, or `x12` from tenfold on."""
    change = round((ratio - 1) * 100)
    return f"x{ratio:,.0f}" if ratio >= 10 else f"{change:+d} %" if change else "0 %"


def category_table(record: MemoryRecord) -> FittedTable:
    """A row for each category, a column for each mode, with the change against the first."""
    modes = record.modes
    unit = unit_for(max(mode.bytes["peak"] for mode in modes))
    table = FittedTable(
        f"one training step at its peak, {unit}",
        text_column(""),
        *(
            TableColumn(mode.label, ALWAYS - n, is_right=True, narrow=MODE_WIDTH)
            for n, mode in enumerate(modes)
        ),
        elsewhere=ELSEWHERE,
    )
    for key, (name, _) in NAMES.items():
        if any(mode.bytes[key] for mode in modes):
            table.add_row(name, *_sizes([mode.bytes[key] for mode in modes], unit))
    table.add_section()
    table.add_row("peak", *_sizes([mode.bytes["peak"] for mode in modes], unit), style="bold")
    places = [mode.peak_at for mode in modes]
    table.add_row("reached in", *(f"{p.op}, {p.module or '(root)'}, {p.phase}" for p in places))
    for phase in ("forward", "backward", "optimizer"):
        peaks = [mode.phase_peaks.get(phase) for mode in modes]
        if any(peaks):
            table.add_row(f"peak of {phase}", *_sizes(peaks, unit))
    if record.limit is not None:
        table.add_section()
        batches = (_largest_batch(mode.fits) for mode in modes)
        table.add_row(f"largest batch in {record.limit}", *batches)
    return table


def module_table(mode: ModeMemory, first: ModeMemory, depth: int | None) -> FittedTable:
    """Memory at the peak by module down to `depth`, and the change against another mode."""
    rows, before = _by_depth(mode, depth), _by_depth(first, depth)
    shown = [key for key in MEMORY_CATEGORIES if any(row[key] for row in rows.values())]
    unit = unit_for(first.bytes["peak"])
    table = FittedTable(
        f"{mode.label} by module, {unit}",
        text_column("module"),
        *(figure_column(NAMES[key][1], IMPORTANCE.index(key)) for key in shown),
        figure_column("all"),
        *([figure_column("change")] if mode is not first else []),
        elsewhere=ELSEWHERE,
    )
    for path, row in _largest(rows):
        cells = [_number(row[key], unit) if row[key] else "" for key in (*shown, "total")]
        if mode is not first:
            same = before.get(path)
            cells.append(change_text(row["total"] / same["total"]) if same else "")
        table.add_row(path or "(root)", *cells)
    return table


def _by_depth(mode: ModeMemory, depth: int | None) -> dict[str, dict[str, int]]:
    """Path to bytes by category and in total; modules deeper than `depth` are added up."""
    rows: dict[str, dict[str, int]] = {}
    for module in mode.modules:
        path = ".".join(module.module.split(".")[:depth])
        row = rows.setdefault(path, dict.fromkeys((*MEMORY_CATEGORIES, "total"), 0))
        for key in row:
            row[key] += getattr(module, key)
    return rows


def _largest(rows: Mapping[str, dict[str, int]]) -> Iterator[tuple[str, dict[str, int]]]:
    """The `MODULES` largest rows, in their order, and the sum of the others."""
    by_size = sorted(rows, key=lambda path: -rows[path]["total"])
    shown = {*by_size} if len(rows) <= MODULES + 1 else {*by_size[:MODULES]}
    yield from ((path, row) for path, row in rows.items() if path in shown)
    if rest := [row for path, row in rows.items() if path not in shown]:
        yield f"{len(rest)} more", {key: sum(row[key] for row in rest) for key in rest[0]}


def _sizes(sizes: Sequence[int | None], unit: str) -> Iterator[str]:
    """Each amount, with its change against the first if it differs; `-` for None."""
    first = sizes[0]
    for n, size in enumerate(sizes):
        if size is None:
            yield "-"
        else:
            change = f" ({change_text(size / first)})" if n and first and size != first else ""
            yield f"{_number(size, unit)}{change}".replace(" ", HARD_BLANK)


def _number(size: int, unit: str) -> str:
    value = size / UNITS[unit]
    return f"{value:,.2f}" if value < 1000 and unit != "B" else f"{value:,.0f}"


def _largest_batch(fits: LargestBatch | None) -> str:
    if fits is None:
        return "-"
    if not fits.batch_size:
        return f"none: 1 needs {amount(fits.tried['1'])}"
    gain = f"{HARD_BLANK}(x{fits.ratio:.2f})" if fits.ratio not in (None, 1.0) else ""
    return f"{fits.batch_size:,}{gain}"
