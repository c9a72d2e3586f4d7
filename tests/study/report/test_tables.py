"""What is printed before a run and after it."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from mprun.records.console import print_table
from mprun.records.console.fitted_table import FittedTable
from mprun.records.run_record import Summary
from mprun.study.report import tables
from tests.schema import conforms
from tests.summaries import example, set_fields


def shown(summary: Summary) -> str:
    """The final table as plain text, a row a line."""
    return shown_table(tables.result(summary))


def shown_table(table: FittedTable) -> str:
    """A table as plain text."""
    console = Console(file=io.StringIO(), force_terminal=False)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(summary: Summary, what: str) -> str | None:
    """The figure beside `what`, or None where the table has no such row."""
    for line in shown(summary).splitlines():
        cells = re.split("  +", line)
        if cells[0] == what:
            return cells[1]
    return None


def unmeasured() -> Summary:
    """A run that ended at once: every figure that may be null is."""
    summary = example()
    set_fields(
        summary,
        samples_per_second=None,
        history=[],
        steps=0,
        wall_time_s=0.0,
        step_time_ms={"median": None, "p10": None, "p90": None, "n": 0, "warmup": 0},
        data_time_ms={"median": None, "p90": None},
        memory_bytes={"peak": None},
        train={"loss": None},
        test={"loss": None, "accuracy": None},
    )
    assert conforms(summary, Summary)
    return summary


# Before


def test_the_header_says_what_is_about_to_run() -> None:
    assert tables.header(example()) == [
        "recipe mnist, precision bf16_mixed (native), seed 7",
        "policy: parameters float32, compute bfloat16, output float32, casting autocast",
        "data: generated glyphs (generated): 48000 training, 12000 validation, 10000 test samples",
        "batch: 64 x 2 = 128",
        "device: cpu, Some CPU (AVX512), 2 threads; contiguous, forloop optimizer",
    ]


@pytest.mark.parametrize("source", ["local", "download", "generated"])
def test_the_data_are_never_shown_without_their_source(source: str) -> None:
    summary = example()
    set_fields(summary.data, name="MNIST", source=source)
    assert any(f"MNIST ({source})" in line for line in tables.header(summary))
    assert row(summary, "data") == f"MNIST ({source})"


# After


def test_the_result_shows_the_figures() -> None:
    summary = example()
    expected = {
        "status": "completed",
        "data": "generated glyphs (generated)",
        "steps": "375 (0 skipped)",
        "step time": "12.50 ms median, 11.25 to 14.75 (p10 to p90), n=365, 10 warm-up",
        "data wait": "0.25 ms",
        "throughput": "10039 samples/s",
        "peak memory of a step": "3 MiB",
        "training loss": "0.5000",
        "validation loss": "0.2500",
        "validation accuracy": "0.9375",
        "test loss": "0.2812",
        "test accuracy": "0.9219",
        "wall time": "6.2 s",
        "note": None,
    }
    assert {what: row(summary, what) for what in expected} == expected
    assert "mnist in bf16_mixed x2" in shown(summary)


def test_scores_of_a_part_of_the_samples_are_labelled() -> None:
    summary = example()
    summary.test.samples = 1_024
    assert row(summary, "test accuracy") == "0.9219 (PARTIAL: the first 1,024 samples)"
    assert row(summary, "validation accuracy") == "0.9375"
    text = shown_table(tables.sweep_table(Path("s"), {"0": summary}))
    assert "accuracy 0.9219 (PARTIAL: 1,024 samples)" in text


def test_what_was_not_measured_is_a_dash() -> None:
    summary = unmeasured()
    for what in ("step time", "data wait", "throughput", "peak memory of a step", "training loss"):
        assert row(summary, what) == "-"
    for what in ("validation loss", "test loss", "test accuracy"):
        assert row(summary, what) is None
    assert row(summary, "note") == "too few full-size steps to time: all were warm-up"
    assert len(tables.header(summary)) == 5


def test_a_broken_loss_and_an_emulated_step_time_are_shown() -> None:
    summary = example()
    assert "EMULATED" not in shown(summary)
    summary.train.loss, summary.test.loss = "nan", "inf"
    summary.execution = "emulated"
    assert row(summary, "training loss") == "nan"
    assert row(summary, "test loss") == "inf"
    assert (row(summary, "step time") or "").endswith("EMULATED: not comparable")
