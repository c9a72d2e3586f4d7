"""The least time of a step on the terminal."""

from __future__ import annotations

import re
from dataclasses import replace

from mprun.records.run_record import StepTimes
from mprun.results.roofline_result import groups_table, roofline_parts, summary
from tests.doctor.test_roofline import roofline


def test_a_row_for_each_group_and_one_for_the_step() -> None:
    rows = [re.split(r"\s{2,}", x.strip()) for x in str(groups_table(roofline())).splitlines()]
    for row in (
        ["matrix products", "1", "0", "4", "6", "67 %"],
        ["casts", "1", "0", "1", "1.5", "67 %"],
        ["between ops", "2.5"],
        ["step", "2", "0", "0", "5", "10", "50 %"],
        ["rates: float32 20 GFLOP/s; 1 GB/s at 1 B to 1 GB/s at 1 B"],
    ):
        assert row in rows, rows


def test_the_summary_names_both_bounds() -> None:
    assert summary(roofline(faults_ms=0.5)) == (
        "a step takes 10 ms (10-10, 9 steps), at least 5 ms: it reaches 50 % of the roof; 4 ms if "
        "casts and memory-bound ops are fused into the products; 100 page faults a step, 0.5 ms"
    )


def test_without_a_timed_step_only_the_bounds_are_shown() -> None:
    none = StepTimes(median=None, p10=None, p90=None, n=0, warmup=0)
    roof = replace(roofline(step_ms=None), step_time_ms=none, share=None)
    assert summary(roof) == (
        "a step takes at least 5 ms; 4 ms if casts and memory-bound ops are fused into the products"
    )


def test_notes_follow_the_summary() -> None:
    roof = replace(roofline(), notes=["one", "two"])
    assert [*roofline_parts(roof)][2:] == ["one", "two"]
