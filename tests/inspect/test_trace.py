"""A trace on the terminal, from figures made by hand."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console

from mprun.inspect.trace import TraceRecord, step_table, totals
from mprun.records.console import print_table
from mprun.records.console.fitted_table import FittedTable
from tests.summaries import example


def cast(have: str, want: str, redundant: str | None = None, ms: float = 0.5) -> dict[str, Any]:
    return {"from": have, "to": want, "bytes": 6, "time_ms": ms, "redundant": redundant}


def row(phase: str, op: str, at: float, *casts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "op": op,
        "phase": phase,
        "module": "",
        "rule": "outside",
        "dtypes_in": ["float32"],
        "dtypes_out": ["float32"],
        "kernels": [op],
        "began_ms": at,
        "time_ms": 2.0,
        "cast_time_ms": sum(c["time_ms"] for c in casts),
        "casts": list(casts),
        **more,
    }


SUMMARY_FIELDS = (
    *("versions", "hardware", "recipe", "precision", "variant", "execution", "backend"),
)
DOWN, UP = ("float32", "bfloat16"), ("bfloat16", "float32")
ROWS = [
    row("forward", "linear", 10.0, cast(*DOWN), cast(*DOWN, ms=0.25), module="a.b", rule="lower"),
    row("forward", "relu", 13.0, cast(*UP, "cast back"), cast(*UP)),
    row("forward", "relu", 16.0),
    row("backward", "mm", 20.0, module="a.b"),
    row("backward", "mm", 23.0, module="a.b", dtypes_in=["bfloat16"]),
    row("backward", "cast", 26.0, cast(*UP), kernels=[], time_ms=0.0),
    *[row("optimizer", "add_", 30.0 + n, rule="disabled") for n in range(3)],
    row("optimizer", "add_", 40.0, cast(*DOWN), rule="disabled"),
]
CONTENT = {
    "schema_version": 1,
    **{name: value for name, value in asdict(example()).items() if name in SUMMARY_FIELDS},
    "step_time_ms": 20.0,
    "rows": ROWS,
    "totals": {
        "time_ms": 21.5,
        "by_dtype": {"float32": [9, 18.0]},
        "casts": 6,
        "cast_bytes": 3 * 2**20,
        "cast_time_ms": 2.5,
        "cast_share": 0.125,
        "redundant": {"cast back": 1, "cast twice": 4},
    },
}


TRACE = msgspec.convert(CONTENT, TraceRecord)


def shown(table: FittedTable) -> list[str]:
    """The lines of a table, each run of spaces as one."""
    console = Console(file=io.StringIO(), force_terminal=False)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_rows_of_the_model_are_shown_one_by_one_with_their_casts() -> None:
    lines = shown(step_table(TRACE.rows))
    assert "forward a.b linear lower fp32 fp32>bf16 x2 2.000 0.750" in lines
    assert "forward (root) relu outside fp32 bf16>fp32 (cast back), bf16>fp32 2.000 1.000" in lines
    assert "forward (root) relu outside fp32 2.000" in lines
    assert "backward a.b mm outside fp32 2.000" in lines
    assert "backward a.b mm outside bf16 > fp32 2.000" in lines


def test_alike_rows_outside_of_the_model_are_one_with_their_number_and_time() -> None:
    optimizer = [line for line in shown(step_table(TRACE.rows)) if line.startswith("optimizer")]
    assert optimizer == [
        "optimizer add_ x3 disabled fp32 6.000",
        "optimizer add_ disabled fp32 fp32>bf16 2.000 0.500",
    ]


def test_totals_are_shown_with_their_units() -> None:
    lines = "\n".join(shown(totals(TRACE)))
    for text in (
        "step, not traced 20.000 ms",
        "ops and casts 21.500 ms",
        "ops that give float32 9 in 18.000 ms",
        "casts 6 in 2.500 ms, 12.5% of the step; 3.00 MiB read and written",
        "redundant casts 1 cast back, 4 cast twice",
    ):
        assert text in lines, text
