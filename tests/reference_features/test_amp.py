"""torch.amp and TF32: autocast, loss scaling and the choice of a mode (rows B1 to B10)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from mprun.cli.main import main
from mprun.precision import disable_casts
from tests.adversarial.recipe import WORDS, write_recipe
from tests.reference_features import faulty
from tests.reference_features.runs import (
    LINEAR,
    MNIST,
    mnist_compared,
    recipes_page,
    written,
)

pytestmark = pytest.mark.usefixtures("native_is_fast", "one_traced_step", "quick_runs")


def test_b5_regions_and_named_modules_stay_out_of_autocast() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16), disable_casts():
        assert torch.equal(x @ w.t(), torch.mm(x, w.t()))
        assert (x @ w.t()).dtype == torch.float32
    words = [*MNIST, "precision=bf16_mixed", "precision.layers={2: fp32}"]
    rows = written("trace", *words, file="trace.json")["rows"]
    linear = {
        row["module"]: row["dtypes_out"]
        for row in rows
        if row["phase"] == "forward" and row["op"] == "linear"
    }
    assert linear == {"0": ["bfloat16"], "2": ["float32"], "4": ["bfloat16"]}


HOSTILE = {"fp16_hostile": "range", "bf16_hostile": "precision"}


@pytest.mark.parametrize("case", HOSTILE)
def test_b7_numerics_says_whether_range_or_precision_is_needed(case: str) -> None:
    write_recipe(Path())
    few = ["numerics.steps=6", "numerics.span=60", "numerics.plots=false"]
    words = [*WORDS, f"recipe.model.case={case}", "precision=fp32", *few]
    verdict = written("numerics", *words, file="numerics.json")["verdict"]
    assert HOSTILE[case] in verdict["word"], verdict


def test_b8_trace_explains_the_op_in_which_two_dtypes_met(
    capsys: pytest.CaptureFixture[str],
) -> None:
    faulty.write_recipe()
    words = [*faulty.WORDS, "recipe.model.fault=float32_tensor", "precision=bf16_true"]
    assert main(["trace", *words, "run.dir=run"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    for word in ("addmm", "last", "float32", "bfloat16", "dtype=x.dtype"):
        assert word in line, line


def test_b8_trace_finds_a_cast_that_the_model_s_author_made() -> None:
    rows = written("trace", *MNIST, "precision=bf16_mixed", file="trace.json")["rows"]
    cast = [row for row in rows if row["op"] == "cast" and row["phase"] == "other"]
    assert [(row["casts"][0]["from"], row["casts"][0]["to"]) for row in cast] == [
        ("bfloat16", "float32")  # the outputs, and nothing else outside of the model
    ]
    assert all(row["dtypes_out"] for row in rows if row["op"] == "linear")


def test_b10_going_on_in_fp16_warns_of_weights_beyond_its_range(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Linear(32, 8).bfloat16()
    with torch.no_grad():
        model.weight[0] = 1e5  # 32 of 264 numbers
    torch.save(model.state_dict(), "trained.pt")
    words = [*LINEAR, "precision=fp16_true", "train.init_from=trained.pt", "train.max_steps=1"]
    main([*words, "run.dir=run"])
    shown = capsys.readouterr()
    assert "32 of 264 overflow (12.121 %)" in shown.out + shown.err


def test_b9_the_published_speed_ups_stand_beside_the_measured_ones() -> None:
    shown, page, data = mnist_compared()
    for text in (shown, page, recipes_page()):
        assert "1.5 to 5.5 times" in text
        assert "V100" in text
    for figure in ("a further 1.3 to 2.5 times", "16 times", "A100"):  # no run measures these
        assert figure in page, figure
        assert figure in recipes_page(), figure
    assert "V100" not in json.dumps(json.loads(data)["variants"])  # no figure of ours
