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

from mprun.inspect.search_result import (
    LAYERS,
    OPS,
    Deviation,
    OpSearch,
    answer_files,
    answer_sentence,
    decibels,
    deviation_text,
    loss,
    outcome_table,
    rows_table,
)
from mprun.records.console import print_table
from mprun.records.console.fitted_table import FittedTable
from mprun.records.layer_values import layer_values
from mprun.records.op_list_files import read_list


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
    }


def outcome(*high: str, **more: Any) -> dict[str, Any]:
    row = {"high": list(high), "harm": 0.1, "measure": measure()}
    return {**row, "cost": 0.25, **more}


CONTENT: dict[str, Any] = {
    "low": "float16",
    "high": "float32",
    "measured_on": {"split": "validation", "batches": 4, "batch_size": 32},
    "tolerance": {"loss": 0.01, "gradient_db": 10.0},
    "unjudged_parameters": [],
    "zero_gradients": [],
    "reference": {"name": "float64", "reason": ""},
    "unavoidable": measure(0.0001, 66.0),
    "everything_lower": {"measure": BROKEN},
    "given": {"name": "autocast", "measure": BROKEN},
    "rows": {
        "ops": [row("linear", 0.1, measure()), row("exp", math.inf, BROKEN)],
        "modules": [row("fc.1", math.inf, BROKEN)],
    },
    "search": {"ops": outcome("exp"), "modules": outcome("fc.1")},
    "lower": ["linear", "bmm"],
    "answer": "ops",
}
GEMMS: dict[str, Any] = {
    **CONTENT,
    "low": "nvfp4",
    "high": "bfloat16",
    "everything_lower": {"measure": BROKEN, "cost": 5.25},
    "given": {"name": "bf16_mixed", "measure": measure(), "cost": 16},
    "rows": {"GEMMs": [row(f"fc.{x}", 0.5, measure()) for x in ("forward", "grad_weight")]},
    "answer": "GEMMs",
    "layers": {"fc": "forward=bf16,grad_weight=nvfp4"},
}


def shown(table: FittedTable) -> str:
    console = Console(file=StringIO())
    print_table(console, table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def search(**more: Any) -> OpSearch:
    return msgspec.convert({**CONTENT, **more}, OpSearch)


def texts(result: OpSearch) -> dict[str, str]:
    return answer_files(result, "recipe mnist, precision fp16_mixed")


def test_of_many_rows_those_with_the_largest_errors_are_shown() -> None:
    rows = [row(f"layer{n}", n / 25, measure()) for n in range(30)]
    lines = shown(rows_table(search(rows={"modules": rows}), "modules")).splitlines()
    named = [line.split() for line in lines if line.strip().startswith("layer")]
    assert [line[0] for line in named] == [f"layer{n}" for n in range(29, 9, -1)]
    assert ["large" in line for line in named] == [n / 25 > 1 for n in range(29, 9, -1)]
    assert "and 10 more, none with a larger error, in search_ops.json" in lines[-1]


def test_the_outcome_marks_the_answer() -> None:
    text = shown(outcome_table(search()))
    assert "ops: exp <-" in text
    assert "25%" in text
    assert "modules: fc.1" in text
    assert "fc.1 <-" not in text
    other = shown(outcome_table(search(answer="modules", always=["relu"])))
    assert "modules: relu and fc.1 <-" in other
    gemms = shown(outcome_table(search(**{**GEMMS, "search": {"GEMMs": outcome(cost=7.1)}})))
    assert "GEMMs: nothing <-" in gemms
    assert [x in gemms for x in ("5.25", "16.00", "7.10")] == [True] * 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "The op exp has to stay in float32."),
        (
            {"search": {"ops": outcome("exp", "pow", "sum")}},
            "The ops exp, pow and sum have to stay in float32.",
        ),
        (
            {"search": {"ops": outcome()}},
            "No op has to stay in float32.",
        ),
        (
            {"search": {"ops": outcome()}, "always": ["relu"]},
            "No op beside those of search_ops.always has to stay in float32.",
        ),
        (
            {"answer": "modules"},
            "The module fc.1 has to stay in float32; that leaves less there than the best list of "
            "ops (exp).",
        ),
        (
            {**GEMMS, "search": {"GEMMs": outcome("fc.forward", cost=7.125)}},
            "The GEMM fc.forward has to stay in bfloat16; 7.12 effective bits over all linear "
            "layers (bfloat16 has 16, 5.25 with all in nvfp4).",
        ),
        (
            {**GEMMS, "search": {"GEMMs": outcome(cost=5.25)}},
            "No GEMM has to stay in bfloat16; 5.25 effective bits over all linear layers "
            "(bfloat16 has 16).",
        ),
        (
            {**GEMMS, "search": {"GEMMs": outcome("fc.forward", "fc.grad_weight", cost=16)}},
            "Every GEMM has to stay in bfloat16: take precision=bf16_mixed.",
        ),
        (
            {
                **GEMMS,
                "budget": 8.0,
                "search": {"GEMMs": outcome("fc.forward", cost=7.125, harm=2.5)},
            },
            "At most 8 effective bits: fc.forward in bfloat16 has the smallest error of the sets "
            "measured, not within the tolerance (2.5 times as much); 7.12 effective bits over all "
            "linear layers (bfloat16 has 16, 5.25 with all in nvfp4).",
        ),
        ({"search": {}, "answer": "none"}, "No answer yet: the search ended before it had one."),
        (
            {"search": {"ops": outcome("exp", harm=2.0)}},
            "No list of ops is enough: with every op in float32 the difference is still too large.",
        ),
    ],
)
def test_the_answer_is_a_sentence(changes: dict[str, Any], text: str) -> None:
    assert answer_sentence(search(**changes)) == text


def test_modules_that_are_not_enough_are_no_outcome() -> None:
    result = search(search={"ops": outcome("exp"), "modules": outcome("fc.1", harm=2.0)})
    assert "fc.1" not in shown(outcome_table(result))


def test_the_files_are_read_as_they_are(tmp_path: Path) -> None:
    def written(result: OpSearch) -> list[str]:
        for name, text in texts(result).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        return list(texts(result))

    def names(kind: str) -> list[str]:
        return [entry.text for entry in read_list(tmp_path / OPS, kind)]

    assert written(search()) == [OPS]
    assert (names("fp32"), names("lower")) == (["exp"], ["linear", "bmm"])
    assert written(search(answer="modules", layers={"fc.1": "fp32"})) == [OPS, LAYERS]
    assert (names("fp32"), names("lower")) == ([], ["linear", "bmm"])
    assert yaml.safe_load((tmp_path / LAYERS).read_text()) == {"fc.1": "fp32"}
    gemms = search(**{**GEMMS, "search": {"GEMMs": outcome("fc.forward", cost=7)}})
    assert written(gemms) == [LAYERS]
    assert layer_values(yaml.safe_load((tmp_path / LAYERS).read_text())) == GEMMS["layers"]
    assert texts(search(search={}, answer="none")) == {}


def test_a_list_that_is_not_enough_says_so() -> None:
    result = search(search={"ops": outcome("exp", harm=2.0)})
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
