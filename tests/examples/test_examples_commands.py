"""The recipes of examples/ through every command, a few steps each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mprun.cli.main import main
from mprun.records.run_record import read_summary
from tests.examples.recipes import EXAMPLES, recipe

pytestmark = pytest.mark.usefixtures("native_is_fast")

SHORT = ["device=cpu", "train.max_steps=3", "run.dir=out"]
SEARCH = ["search_ops.batches=1", "search_ops.warmup_steps=1"]


def record(name: str) -> dict[str, Any]:
    """A JSON file of the command's folder."""
    found: dict[str, Any] = json.loads(Path("out", name).read_text(encoding="utf-8"))
    return found


def check_trace() -> None:
    dtypes = {dtype for op in record("trace.json")["rows"] for dtype in op["dtypes_in"]}
    assert "bfloat16" in dtypes


def check_memory() -> None:
    base, low = record("memory.json")["modes"]
    assert 0 < low["bytes"]["parameters"] < base["bytes"]["parameters"]
    assert low["bytes"]["activations"] > 0


def check_numerics() -> None:
    assert 1 <= record("numerics.json")["loss_scale"]["recommended"] <= 2**24


def check_search() -> None:
    assert record("search_ops.json")["rows"]
    assert Path("out/ops.yaml").is_file()


def check_study() -> None:
    summaries = [read_summary(path.parent) for path in Path("out").rglob("summary.json")]
    assert {s.precision for s in summaries} == {"fp32", "bf16_mixed"}
    for summary in summaries:
        assert summary.status == "completed"
        assert summary.train.loss is not None
        assert math.isfinite(summary.train.loss)


COMMANDS: dict[str, tuple[list[str], Callable[[], None]]] = {
    "trace": (["precision=bf16_mixed"], check_trace),
    "memory": (["precision=fp32,half_sr"], check_memory),
    "numerics": (
        ["precision=fp16_mixed", "numerics.steps=1", "numerics.warmup=1", "numerics.span=3"],
        check_numerics,
    ),
    "search-ops": (
        ["precision=bf16_mixed", *SEARCH],
        check_search,
    ),
    "sweep": (["precision=fp32,bf16_mixed", "seeds=1"], check_study),
    "advise": (["precision=fp32,bf16_mixed", "seeds=2"], check_study),
}


@pytest.mark.representative("vae-search-ops", "strings_adagrad-sweep")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_goes_through_every_command(name: str, command: str) -> None:
    words, check = COMMANDS[command]
    assert main([command, recipe(name), *SHORT, *words]) == 0
    check()
