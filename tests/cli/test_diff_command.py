"""`mprun diff`: two runs, module by module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mprun.cli.main import main

RECIPE = """
import torch
from torch import nn

class Middle(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return {wrap}

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Middle(16, 16), nn.ReLU(), nn.Linear(16, 3))

def data():
    x = torch.randn(64, 8)
    return {{"train": (x, (x.sum(1) > 0).long())}}

def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for mode in ("fp32", "bf16_mixed", "bf16_true"):
        made[mode] = folder / mode
        recipe = folder / "mine.py"
        recipe.write_text(RECIPE.format(wrap="y"))
        args = [f"recipe={recipe}", f"precision={mode}", "train.max_steps=10"]
        assert main([*args, "train.batch_size=16", f"run.dir={made[mode]}"]) == 0
    return made


@pytest.mark.parametrize("mode", ["bf16_mixed", "bf16_true"])
def test_two_modes_have_errors_of_their_dtypes_and_no_first(
    mode: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(runs["fp32"]), str(runs[mode])]) == 0
    out = capsys.readouterr().out
    assert "no error is larger than its dtype explains" in out
    content = json.loads((runs[mode] / "diff.json").read_text())
    assert content["first"] is None
    forward = [row for row in content["rows"] if row["phase"] == "forward" and row["module"] == "2"]
    assert forward[0]["a"]["dtype"] == "float32"
    assert forward[0]["b"]["dtype"] == "bfloat16"
    assert forward[0]["a"]["arising"] < 1e-6 < 1e-4 < forward[0]["b"]["arising"] < 1e-2
    assert content["weights"][0]["relative"] > 0


def test_a_run_beside_itself_has_no_difference(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(runs["fp32"]), str(runs["fp32"])]) == 0
    content = json.loads((runs["fp32"] / "diff.json").read_text())
    assert all(row["relative"] == 0 for row in content["weights"])
    assert content["losses"][0] == content["losses"][1]


def test_runs_of_two_recipes_are_refused(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe=linear", "train.max_steps=3", f"run.dir={tmp_path}/linear"]) == 0
    assert main(["diff", str(runs["fp32"]), f"{tmp_path}/linear"]) == 2
    assert "the runs differ in their recipe: mine and linear" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "mprun diff takes two runs"),
        (["a"], "mprun diff takes two runs"),
        (["nowhere", "nowhere"], "nowhere is no folder of a run"),
        (["{empty}", "{empty}"], "config.yaml cannot be read"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *(a.format(empty=tmp_path) for a in args)]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error
