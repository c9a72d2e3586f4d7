"""One training step, op by op: the content of `trace.json`, its tables, and a file for Perfetto.

A step that cannot run leaves a file with
`schema_version`, `error`, `totals` and `rows` only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import msgspec

from mprun.records.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.mode_names import SHORT_DTYPES
from mprun.records.run_record import BackendRow, Hardware

PHASES = ("forward", "backward", "optimizer", "other")  # The parts of a step
MAX_KINDS = 25  # The most kinds of ops in the summary; the rest are summed in one row
ELSEWHERE = "trace.json"


@dataclass
class TraceSettings:
    """What `mprun trace` shows."""

    ops: bool = False
    """Whether every op is listed below the summary."""


class CastRecord(msgspec.Struct, frozen=True, rename={"from_dtype": "from", "to_dtype": "to"}):
    """A conversion of a tensor's dtype; `from` is a keyword of Python, so fields are renamed."""

    from_dtype: str
    to_dtype: str
    bytes: int  # Read and written
    time_ms: float
    redundant: str | None  # Why it is redundant: `cast back`, `cast twice`; None if it is not


@dataclass(frozen=True)
class TraceRow:
    """A call of the model with its kernels, or an op outside of a call."""

    op: str
    phase: str  # One of `PHASES`
    module: str
    rule: str  # The cast rule that decided the dtype
    dtypes_in: list[str]
    dtypes_out: list[str]
    kernels: list[str]  # The ATen ops that computed; empty for a cast alone
    began_ms: float
    time_ms: float  # Without casts
    cast_time_ms: float
    casts: list[CastRecord]


@dataclass(frozen=True)
class TraceTotals:
    """Sums over a step."""

    time_ms: float
    by_dtype: dict[str, tuple[int, float]]
    """Output dtype to the number of ops and their time in milliseconds."""
    casts: int
    cast_bytes: int
    cast_time_ms: float
    cast_share: float  # Of the time of a step that is not traced
    redundant: dict[str, int]  # Kind of redundancy to the number of casts


@dataclass(frozen=True)
class TraceRecord:
    """All of it."""

    schema_version: int
    versions: dict[str, str | None]
    hardware: Hardware
    recipe: str
    precision: str
    variant: str
    execution: str
    backend: BackendRow
    step_time_ms: float  # The median time of a step that is not traced
    totals: TraceTotals
    rows: list[TraceRow]


def kinds_table(rows: Sequence[TraceRow]) -> FittedTable:
    """A row for each kind of op: those of one phase, rule and dtypes; the longest first."""
    groups: dict[tuple[str, str, str, str], list[TraceRow]] = {}
    for row in rows:
        groups.setdefault((row.phase, row.op, _dtypes(row), row.rule), []).append(row)
    kinds = sorted(groups.items(), key=lambda kind: -_whole_ms(kind[1]))
    shown = kinds[:MAX_KINDS]
    if rest := kinds[MAX_KINDS:]:
        others = [row for _, members in rest for row in members]
        shown.append((("", f"{len(rest)} more kinds", "", ""), others))
    return FittedTable(
        "kinds of ops, the longest first",
        text_column("phase", 4, cell=lambda kind: kind[0][0]),
        text_column("op", cell=lambda kind: kind[0][1]),
        text_column("dtypes", 6, cell=lambda kind: kind[0][2]),
        text_column("rule", 3, cell=lambda kind: kind[0][3]),
        figure_column("ops", 5, lambda kind: str(len(kind[1]))),
        figure_column("ms", cell=lambda kind: f"{sum(row.time_ms for row in kind[1]):.3f}"),
        figure_column("casts", 2, lambda kind: str(sum(len(row.casts) for row in kind[1]) or "")),
        figure_column("in casts", 7, lambda kind: _cast_ms(kind[1])),
        rows=shown,
        elsewhere=ELSEWHERE,
        caption=f"trace.ops=true lists all {len(rows)} ops",
    )


def _whole_ms(rows: Sequence[TraceRow]) -> float:
    return sum(row.time_ms + row.cast_time_ms for row in rows)


def _cast_ms(rows: Sequence[TraceRow]) -> str:
    """The time of their casts; empty without one."""
    has_casts = any(row.casts for row in rows)
    return f"{sum(row.cast_time_ms for row in rows):.3f}" if has_casts else ""


def step_table(rows: Sequence[TraceRow]) -> FittedTable:
    """A row for each call and each op outside of one, in the order they ran."""
    return FittedTable(
        "one training step",
        text_column("phase", 3, cell=lambda x: x[0].phase),
        text_column("module", cell=lambda x: _module(x[0])),
        text_column("op", cell=lambda x: x[0].op + (f" x{x[1]}" if x[1] > 1 else "")),
        text_column("rule", 2, cell=lambda x: x[0].rule),
        text_column("dtypes", 5, cell=lambda x: _dtypes(x[0])),
        text_column("casts", 1, cell=lambda x: ", ".join(_casts(x[0].casts))),
        figure_column("ms", cell=lambda x: f"{x[0].time_ms:.3f}"),
        figure_column("in casts", 4, lambda x: _cast_ms([x[0]])),
        rows=_merged(rows),
        elsewhere=ELSEWHERE,
    )


def _module(row: TraceRow) -> str:
    return row.module or ("(root)" if row.phase == "forward" else "")


def _merged(rows: Sequence[TraceRow]) -> Iterator[tuple[TraceRow, int]]:
    """Rows of the model one by one; equal rows outside of it as one, with their number and time."""
    groups: dict[str, list[TraceRow]] = {}
    for n, row in enumerate(rows):
        is_model = row.phase in ("forward", "backward")
        dtypes = (row.dtypes_in, row.dtypes_out)
        key = str(n if is_model else (row.phase, row.op, row.rule, dtypes, [*_casts(row.casts)]))
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        time_ms = sum(row.time_ms for row in group)
        cast_time_ms = sum(row.cast_time_ms for row in group)
        yield replace(group[0], time_ms=time_ms, cast_time_ms=cast_time_ms), len(group)


def _short(names: Sequence[str]) -> str:
    return " ".join(SHORT_DTYPES.get(name, name) for name in names)


def _dtypes(row: TraceRow) -> str:
    """The dtypes of its kernels' inputs and outputs: `bf16`, or `bf16 fp32 > bf16`."""
    before, after = _short(row.dtypes_in), _short(row.dtypes_out)
    return before if before == after else f"{before} > {after}"


def _casts(casts: Sequence[CastRecord]) -> Iterator[str]:
    """Each kind of cast with its number: `fp32>bf16 x2`."""
    kinds = Counter((c.from_dtype, c.to_dtype, c.redundant) for c in casts)
    for (before, after, redundant), count in kinds.items():
        times = f" x{count}" if count > 1 else ""
        why = f" ({redundant})" if redundant else ""
        yield f"{_short([before])}>{_short([after])}{times}{why}"


def totals(record: TraceRecord) -> FittedTable:
    """The sums over the step's ops and casts."""
    total = record.totals
    redundant = ", ".join(f"{n} {kind}" for kind, n in total.redundant.items())
    rows = {
        "step, not traced": f"{record.step_time_ms:.3f} ms",
        "ops and casts": f"{total.time_ms:.3f} ms",
        **{
            f"ops that give {dtype}": f"{count} in {time_ms:.3f} ms"
            for dtype, (count, time_ms) in total.by_dtype.items()
        },
        "casts": f"{total.casts} in {total.cast_time_ms:.3f} ms, {total.cast_share:.1%} of the "
        f"step; {total.cast_bytes / 2**20:.2f} MiB read and written",
        "redundant casts": redundant or "none",
    }
    return FittedTable(
        "totals",
        text_column("quantity", cell=itemgetter(0)),
        text_column("value", cell=itemgetter(1)),
        rows=rows.items(),
    )


def chrome(rows: Sequence[TraceRow]) -> dict[str, Any]:
    """The trace in Chrome's event format: a track for each phase, casts as events of their own.

    Source: "Trace Event Format", the Chromium project. Times in microseconds.
    """
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": i, "args": {"name": phase}}
        for i, phase in enumerate(PHASES)
    ]

    def add(name: str, kind: str, at_us: float, time_ms: float, args: dict[str, Any]) -> None:
        place = {"ph": "X", "pid": 1, "tid": track, "ts": at_us, "dur": time_ms * 1e3}
        events.append({"name": name, "cat": kind, **place, "args": args})

    start_ms = min((row.began_ms for row in rows), default=0.0)
    for row in rows:
        at_us, track = (row.began_ms - start_ms) * 1e3, PHASES.index(row.phase)
        for cast in row.casts:
            name = f"cast {_short([cast.from_dtype])} to {_short([cast.to_dtype])}"
            add(name, "cast", at_us, cast.time_ms, msgspec.to_builtins(cast))
            at_us += cast.time_ms * 1e3
        if row.kernels:
            names = ("module", "rule", "dtypes_in", "dtypes_out", "kernels")
            args = {name: getattr(row, name) for name in names}
            add(row.op, "op", at_us, row.time_ms, args)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
