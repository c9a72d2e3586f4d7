"""The estimate of a step on several processes, on the terminal."""

from __future__ import annotations

import io
import subprocess
import sys

from rich.console import Console

from mprun.console import print_table
from mprun.console.fitted_table import FittedTable
from mprun.results.estimates import LinkEstimate, ScalingEstimate, scaling_parts


def estimate(enough_link: str | None = "pcie4") -> ScalingEstimate:
    link = LinkEstimate(
        link="ethernet_10g",
        gigabytes_per_second=1.25,
        source="",
        communication_ms=80.0,
        overlapped_ms=80.0,
        sequential_ms=120.0,
        share=2 / 3,
    )
    return ScalingEstimate(
        estimate=True,
        world_size=8,
        parallel="fsdp2",
        compute_ms=40.0,
        compute_from="least time",
        gather_dtype="bfloat16",
        reduce_dtype="float32",
        sent_bytes=100_000_000,
        links=[link],
        enough_gigabytes_per_second=10.0,
        enough_link=enough_link,
        assumptions="all of them",
    )


def test_it_is_labelled_and_the_range_is_shown() -> None:
    table, summary, assumptions = scaling_parts(estimate())
    assert isinstance(table, FittedTable)
    console = Console(file=io.StringIO(), width=100)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "ESTIMATE: a step on 8 processes, fsdp2" in text
    row = next(line for line in text.splitlines() if line.startswith("ethernet"))
    # 8 x 40 ms of one process over a step of 80 to 120 ms
    assert row.split() == ["ethernet_10g", "1.25", "80", "67", "%", "80-120", "2.67-4"]
    assert summary == (
        "each process computes 40 ms (least time) and sends 100 MB a step (parameters in bfloat16, "
        "gradients in float32); without overlap, communication takes less than 20 % of a step "
        "above 10 GB/s (pcie4)"
    )
    assert assumptions == "ESTIMATE, not measured: all of them"


def test_where_no_link_is_enough() -> None:
    _, summary, _ = scaling_parts(estimate(None))
    assert "(no link of the table)" in str(summary)


def test_it_does_not_import_torch() -> None:
    code = "import sys, mprun.results.estimates; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()
