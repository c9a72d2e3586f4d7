"""`mprun diff`: two runs, module by module."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mprun.cli.main import main

pytestmark = pytest.mark.usefixtures("quick_runs", "native_is_fast")

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
    """A run in each mode, of a file whose name no other test's module has."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for mode in ("fp32", "bf16_mixed", "bf16_true"):
        made[mode] = folder / mode
        recipe = folder / "of_diff.py"
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
    assert "no error is larger than rounding to its dtype makes" in out
    content = json.loads((runs[mode] / "diff.json").read_text())
    assert content["first"] is None
    forward = [row for row in content["rows"] if row["phase"] == "forward" and row["module"] == "2"]
    assert forward[0]["a"]["dtype"] == "float32"
    assert forward[0]["b"]["dtype"] == "bfloat16"
    assert forward[0]["a"]["arising"] < 1e-6 < 1e-4 < forward[0]["b"]["arising"] < 1e-2
    assert content["weights"][0]["relative"] > 0


def test_runs_of_two_recipes_are_refused(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe=linear", "train.max_steps=3", f"run.dir={tmp_path}/linear"]) == 0
    assert main(["diff", str(runs["fp32"]), f"{tmp_path}/linear"]) == 2
    assert "the sides differ in their recipe: of_diff and linear" in capsys.readouterr().err


def test_captures_of_two_sides_give_the_same_difference(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(runs["fp32"]), str(runs["bf16_true"])]) == 0
    direct = json.loads((runs["bf16_true"] / "diff.json").read_text())
    for mode in ("fp32", "bf16_true"):
        assert main(["diff", str(runs[mode]), "--save", f"{tmp_path}/{mode}.json"]) == 0
    assert main(["diff", f"{tmp_path}/fp32.json", f"{tmp_path}/bf16_true.json"]) == 0
    from_files = json.loads((tmp_path / "diff.json").read_text())
    assert from_files["rows"] == direct["rows"]
    assert any("the weights differ" in note for note in from_files["notes"])


def test_a_capture_of_another_version_is_said_to_be_one(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(runs["fp32"]), "--save", f"{tmp_path}/here.json"]) == 0
    content = json.loads((tmp_path / "here.json").read_text())
    content["versions"]["torch"] = "1.0.0"
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert main(["diff", f"{tmp_path}/old.json", str(runs["fp32"])]) == 0
    assert "torch: 1.0.0 and" in capsys.readouterr().out
    content["batch_sha256"] = "0" * 64
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert main(["diff", f"{tmp_path}/old.json", str(runs["fp32"])]) == 2
    assert "the sides differ in their batch" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_run_compiled_is_compared_with_itself(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(runs["fp32"]), "--compiled"]) == 0
    out = capsys.readouterr().out
    assert "float64 over errors of outputs and gradients: eager" in out
    content = json.loads((runs["fp32"] / "diff.json").read_text())
    assert content["first"] is None
    assert {"0", "2", "4", ""} <= {row["module"] for row in content["rows"]}
    assert content["accuracy"].keys() == {"eager", "compiled", "emulate_precision_casts"}


def test_a_mode_that_is_not_compiled_is_refused(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = runs["fp32"].parent / "of_diff.py"
    emulated = ["precision=bf16_mixed", "execution=emulated", "train.max_steps=1"]
    assert main([f"recipe={recipe}", *emulated, f"run.dir={tmp_path}/run"]) == 0
    assert main(["diff", f"{tmp_path}/run", "--compiled"]) == 2
    error = capsys.readouterr().err
    assert "cannot be compiled in bf16_mixed: emulated arithmetic rounds op by op" in error


def test_a_damaged_capture_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{", "[]", '{"schema_version": 1, "recipe": 3}', '{"schema_version": 99}'):
        (tmp_path / "bad.json").write_text(text)
        assert main(["diff", f"{tmp_path}/bad.json", f"{tmp_path}/bad.json"]) == 2
        assert "bad.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "mprun diff takes two runs"),
        (["{empty}", "{empty}", "--compiled"], "or one to save or to compile"),
        (["{empty}", "--compiled", "--save", "x.json"], "--compiled and --save are two questions"),
        (["a"], "mprun diff takes two runs"),
        (["{empty}", "{empty}", "--save", "x.json"], "mprun diff takes two runs, or one to save"),
        (["nowhere", "nowhere"], "there is no nowhere"),
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
