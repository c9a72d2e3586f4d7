"""A trace on the terminal, and as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


def step_table(found: Mapping[str, Any]) -> Table:
    """A row for each call and each op outside of one, in the order they ran."""
    table = Table(
        title="one training step",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in ("phase", "module", "op", "rule", "dtypes", "casts"):
        table.add_column(column, overflow="fold", no_wrap=column in ("phase", "rule"))
    for column in ("ms", "in casts"):
        table.add_column(column, justify="right", no_wrap=True)
    for row, count in _merged(found["rows"]):
        table.add_row(
            row["phase"],
            row["module"] or ("(root)" if row["phase"] == "forward" else ""),
            row["op"] + (f" x{count}" if count > 1 else ""),
            row["rule"],
            _dtypes(row),
            ", ".join(_casts(row["casts"])),
            f"{row['time_ms']:.3f}",
            f"{row['cast_time_ms']:.3f}" if row["casts"] else "",
        )
    return table


def _merged(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Rows of the model one by one; of the rest, alike ones as one with their number and time."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for n, row in enumerate(rows):
        model = row["phase"] in ("forward", "backward")
        kept = ("phase", "op", "rule", "dtypes_in", "dtypes_out")
        key = str(n) if model else str([row[k] for k in kept] + list(_casts(row["casts"])))
        alike.setdefault(key, []).append(row)
    for same in alike.values():
        sums = {k: sum(row[k] for row in same) for k in ("time_ms", "cast_time_ms")}
        yield {**same[0], **sums}, len(same)


SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def _short(names: list[str]) -> str:
    return " ".join(SHORT.get(name, name) for name in names)


def _dtypes(row: Mapping[str, Any]) -> str:
    """What its kernels take and give: `bf16`, or `bf16 fp32 > bf16` where that differs."""
    took, gave = _short(row["dtypes_in"]), _short(row["dtypes_out"])
    return took if took == gave else f"{took} > {gave}"


def _casts(casts: list[dict[str, Any]]) -> Iterator[str]:
    """Each kind of cast with how often it was made: `fp32>bf16 x2`."""
    kinds = Counter((c["from"], c["to"], c["redundant"]) for c in casts)
    for (have, want, redundant), count in kinds.items():
        times = f" x{count}" if count > 1 else ""
        why = f" ({redundant})" if redundant else ""
        yield f"{_short([have])}>{_short([want])}{times}{why}"


def totals(found: Mapping[str, Any]) -> Table:
    """What the step's ops and casts come to."""
    total = found["totals"]
    table = Table(title="totals", title_justify="left")
    table.add_column("what")
    table.add_column("figure")
    table.add_row("step, not traced", f"{found['step_time_ms']:.3f} ms")
    table.add_row("ops and casts", f"{total['time_ms']:.3f} ms")
    for dtype, (count, time_ms) in total["by_dtype"].items():
        table.add_row(f"ops that give {dtype}", f"{count} in {time_ms:.3f} ms")
    table.add_row(
        "casts",
        f"{total['casts']} in {total['cast_time_ms']:.3f} ms, {total['cast_share']:.1%} of the "
        f"step; {total['cast_bytes'] / 2**20:.2f} MiB read and written",
    )
    redundant = ", ".join(f"{n} {kind}" for kind, n in total["redundant"].items())
    table.add_row("redundant casts", redundant or "none")
    return table


PHASES = ("forward", "backward", "optimizer", "other")


def chrome(found: Mapping[str, Any]) -> dict[str, Any]:
    """The trace in Chrome's event format: a track for each phase, casts as events of their own.

    Source: "Trace Event Format", the Chromium project. Times in microseconds.
    """
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": i, "args": {"name": phase}}
        for i, phase in enumerate(PHASES)
    ]
    begin = min((row["began_ms"] for row in found["rows"]), default=0.0)
    for row in found["rows"]:
        at, track = (row["began_ms"] - begin) * 1e3, PHASES.index(row["phase"])
        for cast in row["casts"]:
            name = f"cast {_short([cast['from']])} to {_short([cast['to']])}"
            events.append(_event(name, "cast", track, at, cast["time_ms"], cast))
            at += cast["time_ms"] * 1e3
        if row["kernels"]:
            args = {k: row[k] for k in ("module", "rule", "dtypes_in", "dtypes_out", "kernels")}
            events.append(_event(row["op"], "op", track, at, row["time_ms"], args))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(
    name: str, kind: str, track: int, at_us: float, time_ms: float, args: dict[str, Any]
) -> dict[str, Any]:
    place = {"ph": "X", "pid": 1, "tid": track, "ts": at_us, "dur": time_ms * 1e3}
    return {"name": name, "cat": kind, **place, "args": args}
