"""`mprun trace`: what it prints, leaves and refuses; and casts reported while a run trains."""

from __future__ import annotations

import functools
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from mprun.cli.main import main
from mprun.watch.step_events import PHASES
from tests.cli.small import MNIST

pytestmark = pytest.mark.usefixtures("native_is_fast")


def traced(*words: str) -> dict[str, Any]:
    """`trace.json` of a trace into the folder `run`."""
    assert main(["trace", *words, "run.dir=run"]) == 0
    return read("trace.json")


@functools.cache
def _of_mnist() -> tuple[dict[str, Any], str, str]:
    """A trace that several tests look at: its file, output and errors."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        found = traced(*MNIST, "op_lists=hmp")
    return found, out.getvalue(), err.getvalue()


def read(name: str) -> dict[str, Any]:
    """A file of the trace; NaN and Infinity are not JSON, though Python reads and writes them."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = Path("run", name).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return content


# ---- what it shows and leaves --------------------------------------------------------------------


def test_the_terminal_shows_rules_casts_and_totals() -> None:
    found, out, err = _of_mnist()
    assert err == ""
    assert "data: generated glyphs (generated)" in out
    assert out.index("\ntotals\n") < out.index("\nkinds of ops, the longest first\n")
    rows = found["rows"]
    assert "one training step" not in out
    assert f"trace.ops=true lists all {len(rows)} ops" in out
    for rule in ("listed lower", "as forward", "outside", "disabled"):
        assert rule in out
    total = found["totals"]
    for text in (
        f"{found['step_time_ms']:.3f} ms",
        f"{total['time_ms']:.3f} ms",
        f"{total['casts']} in {total['cast_time_ms']:.3f} ms",
        f"{total['cast_share']:.1%} of the step",
        "redundant casts",
        "run/trace.json",
    ):
        assert text in out, text


def test_ops_are_listed_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *MNIST, "op_lists=hmp", "trace.ops=true", "run.dir=run"]) == 0
    listed = capsys.readouterr().out.partition("\none training step\n")[2]
    assert "fp32>bf16 x3" in listed  # inputs, weight and bias of the first layer
    assert listed.count(" linear ") == 3


def test_the_rows_of_the_file_are_a_whole_step() -> None:
    rows = _of_mnist()[0]["rows"]
    forward = [(row["module"], row["op"], row["rule"]) for row in rows if row["phase"] == "forward"]
    assert forward == [
        ("0", "linear", "listed lower"),
        ("1", "relu", "listed lower"),
        ("2", "linear", "listed lower"),
        ("3", "relu", "listed lower"),
        ("4", "linear", "listed lower"),
    ]
    assert {row["phase"] for row in rows} == set(PHASES)
    modules = [row["module"] for row in rows if row["phase"] == "backward" and row["op"] == "mm"]
    assert modules == ["4", "4", "2", "2", "0"]
    assert {row["module"] for row in rows if row["phase"] in ("optimizer", "other")} == {""}


@pytest.mark.parametrize(("mode", "noted"), [("half_sr_full", True), ("bf16_mixed", False)])
def test_ops_that_are_not_pytorch_s_are_noted(
    mode: str, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = traced(*MNIST, f"precision={mode}")
    out = capsys.readouterr().out
    assert ("casts inside them are not counted" in out) == noted
    assert ("autocast: lower" in out) == (mode == "bf16_mixed")
    assert (found["execution"] == "emulated") == noted


def test_lists_that_alternate_cost_casts_at_each_change_of_dtype() -> None:
    Path("fp32.txt").write_text("relu\n", encoding="utf-8")
    Path("lower.txt").write_text("linear\n", encoding="utf-8")
    words = ["op_lists=hmp", "op_lists.fp32_file=fp32.txt", "op_lists.lower_file=lower.txt"]
    found = traced(*MNIST, *words)
    relu = [row for row in found["rows"] if row["op"] == "relu"]
    assert [(row["rule"], len(row["casts"])) for row in relu] == [("listed fp32", 1)] * 2
    # Three layers' weights and biases there and back, the inputs, the outputs there and back; and
    # around each of two relu, there and back, what goes in and what comes out.
    assert found["totals"]["casts"] == 3 * 2 * 2 + 1 + 2 + 2 * 2 * 2


# ---- weights and folders -------------------------------------------------------------------------


# ---- op_lists.verbose ----------------------------------------------------------------------------


def reported_casts(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("cast: ")]


def test_a_verbose_run_reports_each_distinct_cast_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=fashion_mnist", "recipe.model.image_size=28", *MNIST[2:], "train.max_steps=3"]
    assert main([*words, "op_lists=hmp", "op_lists.verbose=true", "run.dir=run"]) == 0
    assert sorted(reported_casts(capsys.readouterr().out)) == [
        "cast: conv2d (lower) in conv1 (Conv2d): float32 to bfloat16",
        "cast: conv2d (lower) in conv2 (Conv2d): float32 to bfloat16",
        "cast: linear (lower) in fc1 (Linear): float32 to bfloat16",
        "cast: linear (lower) in fc2 (Linear): float32 to bfloat16",
        "cast: log_softmax (fp32) in FashionCnn: bfloat16 to float32",
    ]
