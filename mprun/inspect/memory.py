"""`mprun memory`: where the memory of a training step goes, modes side by side.

    mprun memory recipe=fashion_mnist precision=fp32,half_sr
    mprun memory recipe=mnist precision=bf16_mixed memory.fits=16GiB

Takes the overrides of a run; each list of values makes columns. The step runs on fake tensors: no
data are loaded, and no memory of the model's size is allocated. Writes `memory.json`, `memory.png`
and `memory.svg` into the run's folder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mprun.inspect.question import Question, SavedResult, prepared_by
from mprun.records.console.fitted_table import (
    ALWAYS,
    FittedTable,
    TableColumn,
    figure_column,
    text_column,
)
from mprun.records.console.formatting import UNITS, change_text, joined, size_text, unit_for
from mprun.records.run_record import (
    MEMORY_CATEGORIES,
    BatchRow,
    MemoryPeak,
    MemoryTimeline,
    ModuleMemory,
    StorageMemory,
)


@dataclass
class MemorySettings:
    """What `mprun memory` shows."""

    against: str | None = None
    """Precision mode the others are compared with; null: the first of several, else fp32."""
    fits: str | None = None
    """Search the largest train.batch_size whose peak fits in this much memory: 16GiB, 500MB."""
    picture: bool = True
    """Whether the plots are drawn."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch whose step fits in a limit."""

    batch_size: int  # 0 if one sample does not fit
    peak_bytes: int | None
    next_peak_bytes: int | None  # Of a batch with one sample more
    tried: dict[str, int]  # Batch size to peak
    grows: bool  # Whether the peak grows with every sample; if not, a larger batch may fit
    ratio: float | None = None  # Over the first mode's batch size


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer and its implementation."""

    name: str
    impl: str


@dataclass(frozen=True)
class ModeMemory:
    """A step in one mode."""

    label: str
    precision: str
    policy: dict[str, Any]
    batch: BatchRow
    optimizer: OptimizerChoice
    memory_format: str
    bytes: dict[str, int]  # `peak` and `run_record.MEMORY_CATEGORIES` to bytes at the peak
    peak_at: MemoryPeak
    phase_peaks: dict[str, int]  # Phase to the most bytes alive in it
    modules: list[ModuleMemory]
    largest: list[StorageMemory]
    timeline: MemoryTimeline
    fits: LargestBatch | None  # None without a limit
    why_real: str | None = None  # Why the step ran on real tensors; None for fake ones
    ratio: float | None = None  # Peak over the first mode's peak
    same_as: str | None = None
    """The label of a mode before it whose step has the same tensors; it was counted once."""


@dataclass(frozen=True)
class PublishedMemory:
    """A published ratio beside the one counted here."""

    recipe: str
    precision: str
    against: str
    batch_size: int
    ratio: float
    source: str
    ratio_here: float


@dataclass(frozen=True)
class MemoryRecord:
    """All of it."""

    schema_version: int
    recipe: str
    device: str
    versions: dict[str, str | None]
    against: str  # The label of the first mode, which the others are compared with
    limit: str | None  # `memory.fits` as the user wrote it
    limit_bytes: int | None
    published: PublishedMemory | None
    modes: list[ModeMemory]
    left_out: dict[str, str] = field(default_factory=dict)
    """Modes that `precision=all` leaves out, with the reason."""


SCHEMA_VERSION = 1
QUESTION = Question(
    "memory",
    prepared_by("mprun.inspect.memory_of_modes"),
    (MemorySettings,),
    saved=SavedResult(
        "memory.json", MemoryRecord, SCHEMA_VERSION, lambda record: memory_parts(record)
    ),
)

# A category's name, and its short form for narrow columns
NAMES = {
    "parameters": ("parameters", "params"),
    "buffers": ("buffers", "buffers"),
    "gradients": ("gradients", "grads"),
    "optimizer_state": ("optimizer", "optim."),
    "activations": ("activations", "activ."),
    "temporary": ("temporary", "temp."),
}

# The most modules shown: of more, those of repeated blocks are added up; then the rest are
MODULES = 20

COLUMNS = 4  # The most modes shown as columns: more do not fit a terminal, and are rows
NAMED = 3  # The most modes named in a sentence

# Categories in the order in which a narrow table leaves them out
IMPORTANCE = (
    *("buffers", "temporary", "gradients"),
    *("parameters", "optimizer_state", "activations"),
)

ELSEWHERE = "memory.json"  # A table that is cut names the file with the rest


def memory_parts(record: MemoryRecord) -> Iterator[FittedTable | str]:
    """What the terminal shows, in this order."""
    yield _header(record)
    if (sentence := answer(record)) is not None:
        yield sentence
    yield category_table(record) if len(record.modes) <= COLUMNS else mode_table(record)
    for mode in detailed_modes(record):
        yield module_table(mode, record.modes[0])
    yield from _notes(record)


def _header(record: MemoryRecord) -> str:
    batch = record.modes[0].batch
    parts = f" ({batch.accumulate} x {batch.micro})" if batch.accumulate > 1 else ""
    ways = {"fake tensors" if mode.why_real is None else "a real step" for mode in record.modes}
    counted = " or ".join(sorted(ways, reverse=True))  # fake tensors first
    return (
        f"recipe {record.recipe}, batch {batch.effective}{parts}, "
        f"{record.modes[0].optimizer.name}, {record.device}; counted on {counted}"
    )


def _notes(record: MemoryRecord) -> Iterator[str]:
    for label, reason in record.left_out.items():
        yield f"left out: {label}: {reason}"
    if formats := [mode.label for mode in record.modes if mode.policy.get("gemms") != "none"]:
        yield (
            f"note: {', '.join(formats)}: counted with products in 16 bits, an upper bound. The "
            "factors in 8 or 4 bits live as long as a product; the 16-bit copies of weights that "
            "autocast keeps for the backward pass are counted, and layers with such products keep "
            "none"
        )
    for mode in record.modes:
        if mode.why_real is not None:
            yield f"note: the step of {mode.label} is a real one: {mode.why_real}"
    published = record.published
    if published is not None:
        yield (
            f"published for {published.precision} against {published.against} at batch "
            f"{published.batch_size}: {change_text(published.ratio)} ({published.source}); "
            f"here {change_text(published.ratio_here)}"
        )
    for mode in record.modes:
        if mode.fits is not None and not mode.fits.grows:
            yield (
                f"note: the peak of {mode.label} does not grow with every sample: larger "
                "batches than this one may fit"
            )


def answer(record: MemoryRecord) -> str | None:
    """What several modes amount to, in a sentence: which fit, and which needs least; else None."""
    modes, limit = record.modes, record.limit_bytes
    if len(modes) < 2:
        return None
    least = min(mode.bytes["peak"] for mode in modes)
    # as shown: modes that differ by a few bytes need the same for the reader
    alike = [mode.label for mode in modes if size_text(mode.bytes["peak"]) == size_text(least)]
    more = len(alike) - NAMED
    names = joined([*alike[:NAMED], *([f"{more} more"] if more > 0 else [])])
    change = change_text(least / modes[0].bytes["peak"])
    smallest = f"{names} need{'' if len(alike) > 1 else 's'} least, {size_text(least)}"
    if modes[0].bytes["peak"] != least:
        smallest += f" ({change} against {record.against})"
    if limit is None:
        return smallest
    fitting = [mode.label for mode in modes if mode.bytes["peak"] <= limit]
    sizes = {mode.batch.micro for mode in modes}
    batch = f"batch {sizes.pop()}" if len(sizes) == 1 else "its batch"
    count = f"{len(fitting) or 'none'} of {len(modes)} modes fit in {record.limit} with {batch}"
    return f"{count}{': ' if fitting else ''}{', '.join(fitting)}; {smallest}"


def detailed_modes(record: MemoryRecord) -> list[ModeMemory]:
    """The modes shown by module: all of a few; of more, the first and the one that needs least."""
    modes = record.modes
    if len(modes) <= COLUMNS:
        return modes
    least = min(modes, key=lambda mode: mode.bytes["peak"])
    return [modes[0], *([least] if least is not modes[0] else [])]


def category_table(record: MemoryRecord) -> FittedTable:
    """A row for each category, a column for each mode, with the change against the first."""
    modes = record.modes
    unit = unit_for(max(mode.bytes["peak"] for mode in modes))
    table = FittedTable(
        f"one training step at its peak, {unit}",
        text_column(""),
        # a narrow table drops the last modes first, never the one compared with
        *(TableColumn(mode.label, ALWAYS - n, is_right=True) for n, mode in enumerate(modes)),
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


def mode_table(record: MemoryRecord) -> FittedTable:
    """A row for each mode: its peak, the change against the first, and the categories."""
    modes = record.modes
    unit = unit_for(max(mode.bytes["peak"] for mode in modes))
    shown = [key for key in NAMES if any(_is_visible(mode.bytes[key], unit) for mode in modes)]
    table = FittedTable(
        f"one training step at its peak, {unit}",
        text_column("mode"),
        figure_column("peak"),
        figure_column("change"),
        *(figure_column(NAMES[key][1], IMPORTANCE.index(key)) for key in shown),
        text_column("peak in", len(IMPORTANCE)),
        *([figure_column(f"batch in {record.limit}")] if record.limit is not None else []),
        text_column("counted as", len(IMPORTANCE) + 1),
        elsewhere=ELSEWHERE,
    )
    for mode in modes:
        numbers = [_number(mode.bytes[key], unit) for key in ("peak", *shown)]
        change = change_text(mode.ratio) if mode is not modes[0] and mode.ratio is not None else ""
        fits = f"{mode.fits.batch_size:,}" if mode.fits is not None else "-"
        batch = [] if record.limit is None else [fits if fits != "0" else "none"]
        place = [mode.peak_at.phase, *batch, mode.same_as or ""]
        table.add_row(mode.label, numbers[0], change, *numbers[1:], *place)
    return table


def module_table(mode: ModeMemory, first: ModeMemory) -> FittedTable:
    """Memory at the peak by module, and the change against another mode."""
    rows, before = _by_path(mode), _by_path(first)
    if len(rows) > MODULES + 1:  # + 1: the row "1 more" would take the place of the row itself
        rows, before = _blocks_added(rows), _blocks_added(before)
    unit = unit_for(first.bytes["peak"])
    shown = [
        key
        for key in MEMORY_CATEGORIES
        if any(_is_visible(row[key], unit) for row in rows.values())
    ]
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
            # a change against what is shown as 0.00 would be meaningless
            is_known = same is not None and _is_visible(same["total"], unit)
            cells.append(change_text(row["total"] / same["total"]) if same and is_known else "")
        count = row["modules"]
        table.add_row((path or "(root)") + (f" ({count})" if "*" in path else ""), *cells)
    return table


def _by_path(mode: ModeMemory) -> dict[str, dict[str, int]]:
    """Path to bytes by category and in total, and a count of 1."""
    keys = (*MEMORY_CATEGORIES, "total")
    return {
        module.module: {**{key: getattr(module, key) for key in keys}, "modules": 1}
        for module in mode.modules
    }


def _blocks_added(rows: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The rows, those of numbered blocks added up: `layers.0.mlp` and its kin are `layers.*.mlp`.

    A number at the end of a path stays where no parts follow: a sequence's layers differ.
    """
    parents = {path.rpartition(".")[0] for path in rows}
    starred = {path: (BLOCK if path in parents else NUMBER).sub("*", path) for path in rows}
    count = Counter(starred.values())
    added: dict[str, dict[str, int]] = {}
    for path, row in rows.items():
        name = starred[path] if count[starred[path]] > 1 else path
        before = added.get(name, {})
        added[name] = {key: before.get(key, 0) + size for key, size in row.items()}
    return added


BLOCK = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # A part of a path that is a number
NUMBER = re.compile(r"(?<![^.])[0-9]+(?=[.])")  # One with more parts below it


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
            yield f"{_number(size, unit)}{change}"


def _is_visible(size: int, unit: str) -> bool:
    """Whether an amount is shown as more than 0."""
    return bool(_number(size, unit).strip("0."))


def _number(size: int, unit: str) -> str:
    value = size / UNITS[unit]
    # bytes are whole; of a thousand and more, two decimals would widen the column
    return f"{value:,.2f}" if value < 1000 and unit != "B" else f"{value:,.0f}"


def _largest_batch(fits: LargestBatch | None) -> str:
    if fits is None:
        return "-"
    if not fits.batch_size:
        return f"none: 1 needs {size_text(fits.tried['1'])}"
    gain = f" (x{fits.ratio:.2f})" if fits.ratio not in (None, 1.0) else ""
    return f"{fits.batch_size:,}{gain}"
