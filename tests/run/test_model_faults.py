"""A model whose step cannot run: each command says where and why in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mprun.cli.main import main

pytestmark = pytest.mark.usefixtures("native_is_fast")

CLASS = """
from dataclasses import dataclass

import torch

from mprun.data import Splits, TensorSet
from mprun.recipe import Recipe


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    def forward(self, x):
        x = torch.relu(self.first(x))
        x = x + torch.ones(4)  # float32, whatever the model is: the sum is float32
        return self.second(x)


@dataclass(frozen=True)
class Points(Recipe):
    METRIC = ("loss", "min")

    def model(self):
        return Net()

    def data(self, request):
        x = torch.linspace(-1, 1, 32).view(8, 4)
        part = TensorSet(x, x[:, :1])
        return Splits("points", "generated", part, part.first(4), part)

    def loss(self, output, batch):
        return (output - batch[1]).square().mean()
"""
YAML = """# @package _global_
recipe: {name: points, target: own_points.Points}
train: {epochs: 2, batch_size: 4, eval_batch_size: 4, lr: 0.05, optimizer: {name: sgd}}
"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a run of that model."""
    Path("configs/recipe").mkdir(parents=True)
    Path("configs/recipe/points.yaml").write_text(YAML, encoding="utf-8")
    Path("own_points.py").write_text(CLASS, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "own_points", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return ["--config-dir", "configs", "recipe=points", "run.dir=run", "device=cpu"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """What the failed command printed, and its one line of error."""
    assert main([*words]) == 1
    out, err = capsys.readouterr()
    *notices, line = err.splitlines()
    assert all(notice.startswith(("warning: ", "note: ")) for notice in notices)
    assert "Traceback" not in out
    return out, line


def test_a_trace_shows_the_ops_before_the_mismatch(
    own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, line = refused(capsys, "trace", *own, "precision=bf16_true")
    assert "relu" in out
    assert "first" in out
    assert "addmm in the forward pass of module second with inputs in bfloat16 and float32" in line
    assert "precision=bf16_mixed" in line
    trace = json.loads(Path("run/trace.json").read_text(encoding="utf-8"))
    assert [row["op"] for row in trace["rows"]][:2] == ["linear", "relu"]
    assert "module second" in trace["error"]
    assert "Traceback" in Path("run/traceback.txt").read_text(encoding="utf-8")


def test_memory_of_a_step_that_cannot_run_is_not_shown(
    own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, line = refused(capsys, "memory", *own, "precision=bf16_true")
    assert "a step of bf16_true cannot run: addmm in the forward pass of module second" in line
    assert "MiB" not in out
