"""Each table of the terminal at 60, 80 and 200 columns and into a pipe, with long names and many
columns: no figure is broken, no column is cut, and what is left out is named."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType

from mprun.inspect import memory as memory_question
from mprun.inspect import numerics as numerics_question
from mprun.inspect import search_result
from mprun.inspect import trace as trace_question
from mprun.records.console import print_table
from mprun.records.console.fitted_table import FittedTable
from mprun.records.run_record import Summary
from mprun.study.report import tables
from mprun.study.report.comparison_report import comparison_table, short_table
from mprun.study.trials import StudyProgress
from mprun.train.machine import doctor_result
from tests.inspect import test_doctor_result as doctor
from tests.inspect import test_memory as memory
from tests.inspect import test_numerics as numerics
from tests.inspect import test_search_result as search_ops
from tests.inspect import test_trace as trace
from tests.study.report.compared import comparison, of_losses
from tests.summaries import example, set_fields

WIDTHS = (60, 80, 200)
FIGURE = re.compile(r"[-+\[(]?[0-9][0-9.,]*[\])x%,]*")
LAYERS = [
    f"encoder.layers.{n}.self_attention.{part}.weight" for n in range(9) for part in ("q", "out")
]


def run(**changes: object) -> Summary:
    summary = example()
    set_fields(summary, variant="bf16_mixed x2 (train.lr=0.002, train.batch_size=64)", **changes)
    return summary


def of_numerics() -> numerics.NumericsResult:
    kinds = list(numerics_question.KINDS)
    rows = [
        numerics.row(kinds[n % len(kinds)], name, 7.0 * n, verdict)
        for n, name in enumerate(LAYERS)
        for verdict in ("either", "needs precision: fp16")
    ]
    lost = {"updated": 3, "lost_in_run": 0.00001, "fp16": numerics.LOST, "bf16": numerics.LESS}
    by_parameter = dict.fromkeys(LAYERS, lost)
    return numerics.result(rows=rows, lost_updates={"all": lost, "by_parameter": by_parameter})


def of_search() -> search_ops.OpSearch:
    rows = [search_ops.row(name, 3.0, search_ops.measure(0.0027, 9.0)) for name in LAYERS]
    names = search_ops.outcome(*LAYERS[:4], worst_parameter=LAYERS[3])
    return search_ops.search(search_ops.GEMMS, rows=rows, answer=names)


def of_trace() -> trace.TraceRecord:
    down, up = trace.cast(*trace.DOWN), trace.cast(*trace.UP, "cast back")
    rows = [
        trace.row("forward", f"convolution_{n}", n, down, up, module=name, rule="autocast: lower")
        for n, name in enumerate(LAYERS * 2)
    ]
    return msgspec.convert({**trace.CONTENT, "rows": rows}, trace.TraceRecord)


def modes_of_memory() -> list[memory.ModeMemory]:
    names = ("fp32", "half_sr_full", "bf16_mixed train.batch_size=48", "fp16_true", "bf16_sr")
    modules = [memory.row(name, **dict.fromkeys(memory_question.NAMES, 12345)) for name in LAYERS]
    return [
        memory.mode(name, 2 * n + 1, 1.0 + n, modules=modules if n % 2 else modules[3:])
        for n, name in enumerate(names)
    ]


def of_memory() -> memory.MemoryRecord:
    return memory.record(*modes_of_memory(), limit="16GiB")


def sweep() -> FittedTable:
    emulated = run(execution="emulated")
    emulated.test.samples = 1_024
    return tables.sweep_table(Path("outputs/2026-11-21/17-47-33"), {"0": run(), "1": emulated})


def live_table() -> RenderableType:
    modes = ["fp32", "bf16_mixed train.lr=0.002", "half_sr_full"]
    view = StudyProgress(Console(file=io.StringIO()), modes, seeds=10)
    view.begin(modes[1], 0)
    view.end(modes[1], run(), None)
    group = view._table()
    assert isinstance(group, Group)
    return group.renderables[0]


TABLES: dict[str, Callable[[], RenderableType]] = {
    "layers": lambda: tables.layers([(n, "MultiheadAttention", "float32", "bf16") for n in LAYERS]),
    "result": lambda: tables.result(run()),
    "sweep": sweep,
    "study": live_table,
    "machine": lambda: doctor_result.machine_table(doctor.examined()),
    "rates": lambda: doctor_result.rates_table(doctor.examined().rates, 64),
    "modes": lambda: doctor_result.modes_table(doctor.examined().modes, doctor.examined().rates),
    "memory by category": lambda: memory_question.category_table(of_memory()),
    "memory by module": lambda: memory_question.module_table(
        modes_of_memory()[1], modes_of_memory()[0]
    ),
    "numerics": lambda: numerics_question.rows_table(of_numerics(), 30),
    "loss scales": lambda: numerics_question.scales_table(of_numerics()),
    "lost updates": lambda: numerics_question.lost_table(of_numerics(), 30),
    "sensitivity": lambda: search_result.rows_table(of_search()),
    "outcome": lambda: search_result.outcome_table(of_search()),
    "totals": lambda: trace_question.totals(of_trace()),
    "kinds of ops": lambda: trace_question.kinds_table(of_trace().rows),
    "ops": lambda: trace_question.step_table(of_trace().rows),
    "comparison": lambda: comparison_table(comparison(10)),
    "comparison in short": lambda: short_table(comparison(10)),
    "comparison of losses in short": lambda: short_table(of_losses(comparison(12))),
    "comparison of losses": lambda: comparison_table(of_losses(comparison(12))),
}


def printed(table: RenderableType, width: int, is_terminal: bool) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None
    )
    print_table(console, table)  # type: ignore[arg-type]  # a live display's is a group
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_survives_a_narrow_terminal_and_a_pipe(name: str) -> None:
    piped = printed(TABLES[name](), 60, is_terminal=False)
    assert "hidden to fit" not in piped
    figures = {word for word in piped.split() if FIGURE.fullmatch(word)}
    for width in WIDTHS:
        text = printed(TABLES[name](), width, is_terminal=True)
        assert max(map(cell_len, text.splitlines())) <= width, f"{width} columns"
        shown, _, note = text.partition("hidden to fit the width: ")
        assert all(c in piped or c in "\u2500" for c in shown if not c.isspace())
        missing = figures - set(shown.split())
        assert not missing or note, f"{missing} are missing at {width} columns"
        if width == 200 and name != "sweep":
            assert not note


def test_what_matters_most_stays_at_60_columns() -> None:
    text = printed(comparison_table(comparison(10)), 60, is_terminal=True)
    for heading in ("variant", "points", "verdict"):
        assert heading in text
    assert "samples per s" not in text.partition("hidden to fit")[0]
    assert "step ms" in text.partition("hidden to fit the width: ")[2]
    step = printed(trace_question.step_table(of_trace().rows), 60, is_terminal=True)
    assert " ms" in step.partition("\u2500")[0]
    first = printed(memory_question.category_table(of_memory()), 60, is_terminal=True)
    assert "fp32" in first
    assert "bf16_sr" in first.partition("hidden to fit the width: ")[2]


def test_a_row_is_a_line_in_a_pipe() -> None:
    lines = printed(
        numerics_question.rows_table(of_numerics(), 99), 20, is_terminal=False
    ).splitlines()
    assert len(lines) == 4 + 2 * len(LAYERS)
    assert lines[2].split()[:5] == ["kind", "of", "fp16", "pass", "dB"]
    assert all(any(name in line for line in lines) for name in LAYERS)
