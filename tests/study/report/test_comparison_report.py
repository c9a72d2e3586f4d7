"""A comparison on the terminal and in files: the figures are the dataclasses'."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mprun.records.console import print_table
from mprun.records.console.fitted_table import FittedTable
from mprun.study.compare.comparison import (
    Artefact,
    Comparison,
    Estimate,
    Interval,
    Skipped,
    Variant,
    Verdict,
)
from mprun.study.report import answer, cells, exports
from mprun.study.report.comparison_report import comparison_table, footer, short_notes, short_table
from mprun.study.report.exports import write_report
from mprun.study.report.plots import draw
from tests.study.report.compared import HOSTILE, comparison, hostile, of_losses


def shown(
    found: Comparison,
    width: int = 120,
    table: Callable[[Comparison], FittedTable] = comparison_table,
) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_table(console, table(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def changed(found: Comparison, index: int, **fields: Any) -> Comparison:
    """The comparison with another variant at `index`."""
    variants = list(found.variants)
    variants[index] = replace(variants[index], **fields)
    return replace(found, variants=tuple(variants))


# ---- the table -----------------------------------------------------------------------------------


def test_a_row_has_every_figure_of_its_variant() -> None:
    found = comparison(2)
    text = shown(found)
    other = found.variants[1]
    for figure in (
        "bf16_mixed",
        f"{other.step_time_ms.median:.1f}",
        "10.2 to 13.6",  # p10 and p90: 11.364 x 0.9 and x 1.2
        "0.91x",
        "0.88 to 0.94",
        "11043",
        "1.10x",
        "61.0",
        "0.95x",
        "97.04",
        "96.81 to 97.27",
        f"{other.difference.value * 100:+.2f}",
        "-0.23 to +0.09",
        "equivalent",
    ):
        assert figure in text, figure


def test_emulated_rows_say_so_and_have_no_ratio() -> None:
    found = comparison(4)
    tf32 = found.variants[3]
    assert not cells.rows(found)[3].memory[1]
    lying = changed(found, 3, step_time_ratio=Estimate(0.5, None, 3), memory_ratio=0.5)
    for one in (found, lying):
        row = next(line for line in shown(one).splitlines() if line.startswith(tf32.label))
        assert "EMULATED" in row
        assert "x" not in row.replace("EMULATED", "").partition("97.")[0]
    assert "EMULATED" not in shown(comparison(3))


def test_what_is_not_known_is_a_dash() -> None:
    nothing = changed(
        comparison(2),
        1,
        runs=(),
        step_time_ms=None,
        step_time_ratio=None,
        samples_per_second=None,
        throughput_ratio=None,
        memory_bytes={},
        memory_ratio=None,
        metric=None,
        difference=None,
        equivalence=None,
        verdict=Verdict("worse", "3 of 3 runs failed"),
    )
    row = cells.rows(nothing)[1]
    assert [cell[0] for cell in row[2:-1]] == ["-"] * 6
    assert "worse" in shown(nothing)


def test_labels_are_no_markup() -> None:
    text = shown(changed(comparison(2), 1, label="[red]a[/red]"), 200)
    assert "[red]a[/red]" in text
    assert "\x1b" not in shown(changed(comparison(2), 1, label=HOSTILE), 300)


def test_a_regression_has_shares_of_a_loss() -> None:
    found = of_losses(comparison(2))
    heading, row = cells.headings(found), cells.rows(found)[1]
    assert heading.metric[0] == "loss"
    assert heading.difference[0] == "difference %"
    assert row.metric[0] == "0.9704"
    assert row.difference[0] == "-0.07"
    assert "differences of training loss within 2.00 % do not matter" in "\n".join(footer(found))


@given(st.lists(st.integers(0, 2**45), min_size=1, max_size=4))
def test_memory_is_in_one_unit_and_right(peaks: list[int]) -> None:
    found = comparison(len(peaks))
    for i, peak in enumerate(peaks):
        found = changed(found, i, memory_bytes={"peak": peak})
    size = cells.memory_unit(found)[1]
    for row, peak in zip(cells.rows(found), peaks, strict=True):
        # half a unit of the last digit shown; the last of bytes is a byte
        assert abs(float(row.memory[0]) - peak / size) <= (0.05001 if size > 1 else 0)


# ---- under the table -----------------------------------------------------------------------------


def test_the_footer_says_what_was_compared() -> None:
    lines = "\n".join(footer(comparison(5)))
    for text in (
        "baseline fp32; differences of test accuracy within 0.50 points",
        "MNIST (local)",
        "Some CPU (AVX512)",
        "torch 2.11.0",
        "note: A note.",
        "half_sr better: what decided about 2",
        "fp16_mixed inconclusive: what decided about 4",
    ):
        assert text in lines, text
    assert "equivalent" not in lines


def test_failed_runs_are_told_with_their_errors() -> None:
    found = comparison(2)
    run = found.variants[1].runs[0]
    run.summary.error = "the loss became nan"
    found = changed(found, 1, failed=(run,))
    assert "failed: bf16_mixed, seed 0: the loss became nan" in footer(found)


# ---- in short ------------------------------------------------------------------------------------


def test_in_short_each_variant_is_one_line_of_100_columns() -> None:
    found = changed(comparison(10), 2, substituted="matmuls in fp32")
    lines = shown(found, 100, short_table).splitlines()
    assert lines[1] == (
        "mnist: 10 variants, 3 seeds each; differences of test accuracy within 0.50 points do not "
        "matter"
    )
    rows = lines[5:15]
    for row, variant in zip(rows, found.variants, strict=True):
        assert row.startswith(variant.label)
        assert row.split()[-1] == variant.verdict.word
    assert "hidden to fit" not in "".join(lines)
    assert "0.91x [0.88, 0.94]" in rows[1]
    assert "-0.07 [-0.23, +0.09]" in rows[1]
    assert "EMULATED" in rows[3]
    assert "x [0.80, 0.86] *" in rows[2]
    assert lines[15].startswith("* matmuls in fp32, as this machine has no float16 kernel")
    narrow = shown(found, 80, short_table)
    assert "0.91x [0.88, 0.94]" in narrow
    assert "-0.07 [-0.23, +0.09]" in narrow


def test_in_short_rates_are_compared_where_batches_differ() -> None:
    found = comparison(2)
    assert "time ratio" in shown(found, 120, short_table)
    found.variants[1].runs[0].summary.batch_size = 256
    text = shown(found, 120, short_table)
    assert "samples/s ratio" in text
    assert "1.10x [1.05, 1.15]" in text


def test_in_short_one_reason_is_one_note_the_most_important_first() -> None:
    found = comparison(10)  # fp16_mixed and half_sr_full are inconclusive
    artefact = Artefact("load", "other processes ...", "run again while nothing else runs", 0.9)
    for index in (1, 3):
        found = changed(found, index, artefacts=(artefact,))
    run = found.variants[2].runs[0]
    run.summary.error = "the loss became nan"
    found = changed(found, 2, failed=(run,))
    found = changed(found, 7, verdict=Verdict("worse", "1 of 3 runs ended with loss nan"))
    shown_in_table = Verdict("worse", "so", None, Interval(-0.01, -0.006), 0.95)
    found = changed(found, 3, verdict=shown_in_table)
    notes = ("baseline: fp32, by default", "verdicts: Holm over 9 variants", "A note.")
    skipped = (Skipped(Path("a"), "still running"), Skipped(Path("b"), "still running"))
    lines = short_notes(replace(found, notes=notes, skipped=skipped))
    assert lines == [
        "failed: half_sr 1 of 4 runs; the first: the loss became nan",
        "worse: bf16_sr (1 of 3 runs ended with loss nan)",
        "not settled: fp16_mixed, half_sr_full (about 4 more seeds)",
        "note: no verdict on the times of bf16_mixed, tf32: load; run again while nothing "
        "else runs",
        "skipped 2 folders: 2 x still running",
        "note: A note.",
    ]


# ---- the answer ----------------------------------------------------------------------------------


def test_the_answer_names_the_fastest_and_the_smallest_that_keep_the_metric() -> None:
    found = comparison(7)  # equivalent are bf16_mixed and bf16_true, better half_sr and fp16_true
    found = changed(found, 6, throughput_ratio=Estimate(1.02, Interval(0.97, 1.07), 3))
    first, second = answer.headline(found)
    assert first == (
        "bf16_true keeps the accuracy (equivalent within 0.50 points, 3 seeds), takes 23 % less "
        "peak memory and trains 1.50 times as fast as fp32 (ratio of samples per s, 95 % interval "
        "1.45 to 1.55, n=3). Its time to equal validation loss is not known (no run was validated)."
    )
    assert second == (
        "fp16_true improves the accuracy, takes 28 % less peak memory and leaves speed open "
        "(measured 1.02x the samples per s, 95 % interval 0.97 to 1.07, n=3; about 2 more seeds "
        "would settle it)."
    )


def test_the_answer_never_rests_on_what_is_emulated_or_not_settled() -> None:
    found = comparison(5)
    for index in (1, 2, 4):
        found = changed(found, index, verdict=Verdict("inconclusive", "few seeds", 9))
    found = changed(
        found,
        3,
        verdict=Verdict("equivalent", "so"),
        throughput_ratio=Estimate(9.0, Interval(8.0, 10.0), 3),
        memory_ratio=0.1,
    )
    assert answer.headline(found) == [
        "No variant was shown to keep the accuracy of fp32 and to be faster or smaller. Type next: "
        "mprun sweep ... first_seed=3, which should settle bf16_mixed."
    ]
    assert "its speed and memory are not judged" in answer.variant_sentences(found)[2]


def test_a_slower_variant_and_one_of_one_seed_are_not_called_faster() -> None:
    found = comparison(2)
    slow = changed(found, 1, throughput_ratio=Estimate(0.5, Interval(0.4, 0.6), 3), memory_ratio=1)
    assert answer.headline(slow)[0].startswith("No variant")
    assert (
        "takes 2.00x the time (per sample, 95 % interval 1.67 to 2.50, n=3)"
        in (answer.variant_sentences(slow)[0])
    )
    one = changed(found, 1, throughput_ratio=Estimate(2.0, None, 1), memory_ratio=None)
    assert answer.headline(one)[0].startswith("No variant")
    assert "one seed, so without an interval" in answer.variant_sentences(one)[0]


def test_an_answer_of_not_shown_says_what_to_type_next() -> None:
    found = changed(comparison(3), 1, verdict=Verdict("worse", "so"))
    nearest = Interval(-1, 1)  # the fewest seeds are named, not those of the first variant
    for limit, verdict in (
        ("", Verdict("inconclusive", "few seeds", 6, nearest)),
        (" seeds_limit=33", Verdict("inconclusive", "few seeds", 30, nearest)),
        ("", Verdict("inconclusive", "one seed in common with the baseline")),
    ):
        (text,) = answer.headline(changed(found, 2, verdict=verdict))
        assert f"Type next: mprun sweep ... first_seed=3{limit}, which should" in text
    planned = replace(changed(found, 2, verdict=Verdict("inconclusive", "", 6)), planned_pairs=(4,))
    (text,) = answer.headline(planned)
    folder = found.variants[2].runs[0].path.parent
    assert f"Type next: mprun sweep run.resume={folder}, which goes on until" in text
    hopeless = Verdict("inconclusive", "over 1000 seeds", None, nearest)
    for verdict in (hopeless, Verdict("worse", "so")):
        (text,) = answer.headline(changed(found, 2, verdict=verdict))
        assert text.endswith("Take fp32. Type next: mprun doctor, for native formats.")
    same, speed = Verdict("equivalent", "so"), Estimate(1.02, Interval(0.97, 1.07), 3)
    (text,) = answer.headline(
        changed(found, 2, verdict=same, throughput_ratio=speed, memory_ratio=1)
    )
    assert "Type next: mprun sweep ... first_seed=3 seeds=5, which should settle" in text


def test_one_variant_has_no_verdict() -> None:
    assert answer.headline(comparison(1)) == [
        "There is nothing to compare fp32 with: all runs are of one variant."
    ]
    assert answer.variant_sentences(comparison(1)) == []


# ---- files ---------------------------------------------------------------------------------------


def test_csv_has_every_number_at_full_precision() -> None:
    found = comparison(10)
    rows = list(csv.DictReader(io.StringIO(exports.csv_text(found))))
    assert [row["label"] for row in rows] == [v.label for v in found.variants]
    for row, v in zip(rows, found.variants, strict=True):
        assert row["verdict"] == v.verdict.word
        for name, value in numbers_of(v).items():
            assert (float(row[name]) if row[name] else None) == value, name


def numbers_of(v: Variant) -> dict[str, float | None]:
    """Column to figure."""
    found: dict[str, float | None] = {
        "runs": len(v.runs),
        "samples_per_second": v.samples_per_second,
        "memory_ratio": v.memory_ratio,
        "more_seeds": v.verdict.more_seeds,
        **{f"memory_{k}_bytes": x for k, x in v.memory_bytes.items()},
    }
    found |= {f"step_time_ms_{k}": x for k, x in v.step_time_ms._asdict().items()}
    found["equivalence_low"], found["equivalence_high"] = v.equivalence or (None, None)
    for name in ("step_time_ratio", "throughput_ratio", "metric", "difference"):
        estimate: Estimate | None = getattr(v, name)
        found[name] = estimate and estimate.value
        found[f"{name}_n"] = estimate and estimate.n
        interval = estimate.interval if estimate else None
        found[f"{name}_low"], found[f"{name}_high"] = interval or (None, None)
    return found


def test_json_is_the_comparison() -> None:
    found = comparison(4)
    read = json.loads(exports.json_text(found))
    assert read["schema_version"] == 1
    assert (read["recipe"], read["margin"], read["baseline"]) == ("mnist", 0.005, "fp32")
    for row, v in zip(read["variants"], found.variants, strict=True):
        assert row["metric"]["value"] == v.metric.value
        assert row["step_time_ms"] == v.step_time_ms._asdict()
        assert row["memory_bytes"] == v.memory_bytes
        assert row["verdict"]["word"] == v.verdict.word
        assert [run["summary"]["seed"] for run in row["runs"]] == [0, 1, 2]
        assert [run["path"] for run in row["runs"]] == [str(run.path) for run in v.runs]
    interval = found.variants[1].difference.interval
    assert read["variants"][1]["difference"]["interval"] == interval._asdict()


def test_json_writes_what_is_not_finite_as_words() -> None:
    found = changed(comparison(2), 1, metric=Estimate(math.nan, Interval(-math.inf, math.inf), 2))
    metric = json.loads(exports.json_text(found))["variants"][1]["metric"]
    assert metric == {"value": "nan", "interval": {"low": "-inf", "high": "inf"}, "n": 2}


def test_markdown_has_the_table_s_figures() -> None:
    found = comparison(5)
    lines = exports.markdown(found).splitlines()
    table = [line for line in lines if line.startswith("|")]
    for line, row in zip(table[2:], cells.rows(found), strict=True):
        text = line.replace("\\", "")
        assert text.count("|") == len(row) + 1
        assert all(part in text for cell in row[1:] for part in cell)
    assert table[1] == "|---|---:|---:|---:|---:|---:|---:|---:|---|"


def test_markdown_escapes_what_records_hold(tmp_path: Path) -> None:
    text = exports.markdown(hostile(tmp_path))
    assert not re.search(r"(?<!\\)<", text)
    assert not re.search(r"&(?!amp;)", text)
    for line in text.splitlines():
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) == 10


def test_a_report_is_a_page_three_tables_and_the_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = functools.partial(draw, names=["difference"])
    monkeypatch.setattr("mprun.study.report.exports.draw", some)
    found = comparison(3, tmp_path / "runs")
    folder = tmp_path / "new" / "report"
    (tmp_path / "new").mkdir()
    paths = write_report(found, folder)
    assert [p.name for p in paths[:4]] == [
        *("report.html", "comparison.md", "comparison.csv", "comparison.json")
    ]
    assert sorted(folder.iterdir()) == sorted(paths)  # and no temporary file is left
    for path in paths[4:]:
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [p.name for p in paths[4:]] == ["comparison-difference.png"]

    first = {p.name: p.read_bytes() for p in paths}
    write_report(found, folder)
    assert {p.name: p.read_bytes() for p in paths} == first, "the same runs, other bytes"

    write_report(comparison(1, tmp_path / "others"), folder)
    assert not (folder / "comparison-difference.png").exists(), "the plot of another comparison"
