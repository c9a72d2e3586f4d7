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
    OpSearch,
    answer_files,
    answer_sentence,
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
    return {"name": name, "calls": 2, "harm_alone": harm, "alone": alone}


def outcome(*high: str, harm: float = 0.1, **more: Any) -> dict[str, Any]:
    return {"high": list(high), "harm": harm, "measure": measure(**more)}


CONTENT: dict[str, Any] = {
    "kind": "op",
    "low": "float16",
    "high": "float32",
    "measured_on": {"split": "validation", "batches": 4, "batch_size": 32},
    "tolerance": {"loss": 0.01, "gradient_db": 10.0},
    "unjudged_parameters": [],
    "zero_gradients": [],
    "reference": {"name": "float64", "reason": ""},
    "unavoidable": measure(0.0001, 66.0),
    "everything_lower": BROKEN,
    "given": BROKEN,
    "given_name": "autocast",
    "rows": [row("linear", 0.1, measure()), row("exp", math.inf, BROKEN)],
    "answer": outcome("exp"),
    "lower": ["exp", "linear", "bmm"],
}
GEMMS: dict[str, Any] = {
    **CONTENT,
    "kind": "GEMM",
    "low": "nvfp4",
    "high": "bfloat16",
    "given": measure(),
    "given_name": "bf16_mixed",
    "rows": [row(f"fc.{x}", 0.5, measure()) for x in ("forward", "grad_weight")],
    "answer": outcome("fc.forward"),
    "layers": {"fc": "forward=bf16,grad_weight=nvfp4"},
}


def shown(table: FittedTable) -> str:
    console = Console(file=StringIO())
    print_table(console, table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def search(content: dict[str, Any] = CONTENT, **more: Any) -> OpSearch:
    return msgspec.convert({**content, **more}, OpSearch)


def texts(result: OpSearch) -> dict[str, str]:
    return answer_files(result, "recipe mnist, precision fp16_mixed")


@pytest.mark.parametrize(
    ("content", "changes", "text"),
    [
        (CONTENT, {}, "The op exp has to stay in float32."),
        (GEMMS, {}, "The GEMM fc.forward has to stay in bfloat16."),
        (
            GEMMS,
            {"answer": outcome("fc.forward", "fc.grad_weight"), "layers": {}},
            "Every GEMM has to stay in bfloat16: take precision=bf16_mixed.",
        ),
        (
            CONTENT,
            {"answer": outcome("exp", harm=2.0)},
            "No list of ops is enough: with every op in float32 the difference is still too large.",
        ),
    ],
)
def test_the_answer_is_a_sentence(
    content: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    assert answer_sentence(search(content, **changes)) == text


def test_the_files_are_read_as_they_are(tmp_path: Path) -> None:
    def written(result: OpSearch) -> list[str]:
        for name, text in texts(result).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        return list(texts(result))

    def names(kind: str) -> list[str]:
        return [entry.text for entry in read_list(tmp_path / OPS, kind)]

    assert written(search()) == [OPS]
    assert (names("fp32"), names("lower")) == (["exp"], ["linear", "bmm"])
    assert written(search(answer=outcome())) == [OPS]
    assert (names("fp32"), names("lower")) == ([], ["exp", "linear", "bmm"])
    assert written(search(GEMMS)) == [LAYERS]
    assert layer_values(yaml.safe_load((tmp_path / LAYERS).read_text())) == GEMMS["layers"]


def test_a_list_that_is_not_enough_says_so() -> None:
    result = search(answer=outcome("exp", harm=2.0))
    assert "# THIS EXCEEDS THE TOLERANCE" in texts(result)[OPS]
