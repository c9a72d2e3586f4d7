"""torch.amp and TF32: autocast, loss scaling and the choice of a mode (rows B1 to B10)."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.recipes.linear import Linear
from tests.reference_features.runs import (
    LINEAR,
    MNIST,
    mnist_compared,
    recipes_page,
    written,
)

pytestmark = pytest.mark.usefixtures("native_is_fast", "one_traced_step", "quick_runs")


class Net(nn.Module):
    """A float32 tensor comes between two layers, whatever the mode."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x) + torch.zeros(8))
        return out


@dataclass(frozen=True)
class Faulty(Linear):
    """`recipe=linear` with that model."""

    def model(self) -> nn.Module:
        return Net(self.in_features, self.out_features)


def test_b8_trace_explains_the_op_in_which_two_dtypes_met(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*LINEAR, f"recipe.target={__name__}.Faulty", "precision=bf16_true"]
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
