"""A search on the terminal and in files, from plain values."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from rich.console import Console

from mprun.console import print_table
from mprun.console.fitted_table import FittedTable
from mprun.records.op_list_files import read_list
from mprun.results import search_tables
from mprun.results.search_result import Deviation, OpSearch, Proof
from mprun.results.search_tables import (
    ALL_LOWER,
    LAYERS,
    OPS,
    answer_sentence,
    decibels,
    deviation_text,
    loss,
    outcome_table,
    proof_lines,
    rows_table,
)


def measure(difference: float = 0.001, db: float = 50.0, **more: Any) -> dict[str, Any]:
    row = {"loss_difference": difference, "gradients_db": db, "worst_db": db}
    return {**row, "worst_parameter": "fc.weight", "loss_scale": 1.0, "failure": "", **more}


BROKEN = measure(math.nan, math.nan, worst_parameter="")


def row(name: str, harm: float, alone: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "calls": 2,
        "harm_alone": harm,
        "alone": alone,
        "kept": measure(),
        "time_ratio": 1.25,
    }


def outcome(*fp32: str, **more: Any) -> dict[str, Any]:
    row = {"fp32": list(fp32), "is_within": True, "harm": 0.1, "measure": measure()}
    return {**row, "float32_share": 0.25, "time_ratio": 1.1, "steps": [], **more}


CONTENT: dict[str, Any] = {
    "dtype": "float16",
    "measured_on": {"split": "validation", "batches": 4, "batch_size": 32},
    "tolerance": {"loss": 0.01, "gradient_db": 10.0},
    "unjudged_parameters": [],
    "zero_gradients": [],
    "reference": {"name": "float64", "reason": ""},
    "unavoidable": {"measure": measure(0.0001, 66.0)},
    "everything_lower": {"measure": BROKEN, "time_ratio": 1.0},
    "float32": {"time_ratio": 2.0},
    "given": {"name": "autocast", "measure": BROKEN, "time_ratio": None},
    "ops": [row("linear", 0.1, measure()), row("exp", math.inf, BROKEN)],
    "modules": [row("fc.1", math.inf, BROKEN)],
    "search": {"ops": outcome("exp"), "modules": outcome("fc.1")},
    "always": [],
    "lower": ["linear", "bmm"],
    "answer": "ops",
}


def shown(table: FittedTable) -> str:
    console = Console(file=StringIO())
    print_table(console, table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def search(**more: Any) -> OpSearch:
    return msgspec.convert({**CONTENT, **more}, OpSearch)


def texts(result: OpSearch) -> dict[str, str]:
    return search_tables.texts(result, "recipe mnist, precision fp16_mixed")


def test_the_most_harmful_op_stands_first() -> None:
    lines = shown(rows_table(search(), "ops")).splitlines()
    rows = [line for line in lines if " x1.25" in line]
    assert rows[0].split()[:3] == ["exp", "2", "not"]
    assert "harmful" in rows[0]
    assert "harmful" not in rows[1]


def test_of_many_rows_the_most_harmful_are_shown() -> None:
    rows = [row(f"layer{n}", n / 100, measure()) for n in range(30)]
    text = shown(rows_table(search(modules=rows), "modules"))
    assert "layer29 " in text
    assert "layer10 " in text
    assert "layer9 " not in text
    assert "and 10 more, none more harmful, in search_ops.json" in text


def test_the_outcome_marks_the_answer() -> None:
    text = shown(outcome_table(search()))
    assert "ops: exp <-" in text
    assert "modules: fc.1" in text
    assert "fc.1 <-" not in text
    assert "x2.00" in text
    other = shown(outcome_table(search(answer="modules", always=["relu"])))
    assert "modules: relu, fc.1 <-" in other


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "The op exp has to stay in float32."),
        (
            {"search": {"ops": outcome("exp", "pow", "sum"), "modules": None}},
            "The ops exp, pow and sum have to stay in float32.",
        ),
        (
            {"search": {"ops": outcome(), "modules": None}},
            "No op has to stay in float32.",
        ),
        (
            {"search": {"ops": outcome(), "modules": None}, "always": ["relu"]},
            "No op beside those of search_ops.always has to stay in float32.",
        ),
        (
            {"answer": "modules"},
            "The module fc.1 has to stay in float32; that leaves less there than the best list of "
            "ops (exp).",
        ),
        (
            {"search": {"ops": outcome("exp", is_within=False), "modules": None}},
            "No list of ops is enough: with every op in float32 the difference is still too large.",
        ),
    ],
)
def test_the_answer_is_a_sentence(changes: dict[str, Any], text: str) -> None:
    assert answer_sentence(search(**changes)) == text


def test_modules_that_are_not_enough_are_no_outcome_and_no_file() -> None:
    result = search(search={"ops": outcome("exp"), "modules": outcome("fc.1", is_within=False)})
    assert "fc.1" not in shown(outcome_table(result))
    assert list(texts(result)) == [OPS]


def test_the_files_are_read_as_they_are(tmp_path: Path) -> None:
    for name, text in texts(search()).items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    def names(file: str, kind: str) -> list[str]:
        return [entry.text for entry in read_list(tmp_path / file, kind)]

    assert (names(OPS, "fp32"), names(OPS, "lower")) == (["exp"], ["linear", "bmm"])
    assert (names(ALL_LOWER, "fp32"), names(ALL_LOWER, "lower")) == ([], ["linear", "bmm"])
    assert yaml.safe_load((tmp_path / LAYERS).read_text()) == {"fc.1": "fp32"}


def test_a_list_that_is_not_enough_says_so() -> None:
    result = search(search={"ops": outcome("exp", is_within=False), "modules": None})
    assert "# THIS EXCEEDS THE TOLERANCE" in texts(result)[OPS]


@pytest.mark.parametrize(
    ("measurement", "text"),
    [
        (measure(), "loss 0.1 % off, gradients 50 dB, worst 50 dB (fc.weight)"),
        (measure(0.0, math.inf), "loss 0 % off, gradients exact, worst exact (fc.weight)"),
        (
            measure(0.0, math.nan),
            "loss 0 % off, gradients not finite, worst not finite (fc.weight)",
        ),
        (BROKEN, "the loss is not finite"),
        (measure(math.inf, math.nan), "the loss is not finite"),
        (measure(math.nan, math.nan, failure="no kernel"), "fails (no kernel)"),
    ],
)
def test_a_measurement_in_a_line(measurement: dict[str, Any], text: str) -> None:
    assert deviation_text(Deviation(**measurement)) == text


def test_a_failing_op_is_no_loss() -> None:
    assert loss(Deviation(**measure(math.nan, failure="no kernel"))) == "fails"
    assert decibels(-math.inf) == "-inf dB"


PROOF: dict[str, Any] = {
    "steps": 100,
    "split": "validation",
    "metric": "loss",
    "is_relative": True,
    "margin": 0.02,
    "values": [0.5, 0.4],
    "float32_values": [0.5, 0.4],
    "failures": [None, None],
    "skipped_steps": [0, 0],
    "difference": 0.01,
    "interval": [-0.02, 0.04],
    "equivalence_interval": [-0.01, 0.03],
    "verdict": "inconclusive",
    "reason": "why",
    "more_seeds": 3,
    "step_time_ratio": 0.5,
}


def lines_of(proof: dict[str, Any]) -> list[str]:
    return list(proof_lines(msgspec.convert(proof, Proof)))


def test_the_proof_has_its_figures() -> None:
    assert lines_of(PROOF) == [
        "proof: 2 pairs of trainings of 100 steps, validation loss minus float32's: +1.00 % "
        "(95 %: -2.00 to +4.00), margin 2 %: inconclusive, about 3 more seeds; why",
        "step time in these trainings: 0.500 of float32's",
    ]
    accuracy = {**PROOF, "metric": "accuracy", "is_relative": False, "margin": 0.005}
    (line, _) = lines_of(accuracy)
    assert (
        "accuracy minus float32's: +1.00 points (95 %: -2.00 to +4.00), margin 0.5 points" in line
    )


def test_the_proof_names_trainings_that_failed_and_steps_that_were_skipped() -> None:
    failed = {**PROOF, "failures": [None, "the loss became nan"], "skipped_steps": [3, 1]}
    failed |= {"difference": math.nan, "interval": None, "verdict": "worse", "more_seeds": None}
    lines = lines_of({**failed, "step_time_ratio": None})
    assert "minus float32's: not finite, margin 2 %: worse; why" in lines[0]
    assert lines[1:] == [
        "seed 1: the loss became nan",
        "steps skipped because a gradient overflowed, by seed: 3, 1",
    ]
