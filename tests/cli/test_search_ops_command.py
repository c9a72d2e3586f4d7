"""`mprun search-ops`: what it finds, prints, leaves and refuses, by real runs."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from mprun.cli.main import main
from mprun.config import compose
from mprun.inspect.search_result import OpSearch
from mprun.precision import op_lists
from mprun.records.console import JobProgress
from mprun.records.run_record import read_summary
from mprun.train.assemble import make_plan

pytestmark = pytest.mark.usefixtures("native_is_fast")

RECIPE = """\
# @package _global_
# Two layers with something between them
recipe:
  name: planted
  target: planted.Classes
  model:
    plant: "{plant}"
train:
  max_steps: 20
  batch_size: 16
  eval_batch_size: 16
  lr: 0.05
  optimizer:
    name: sgd
"""
CODE = """
from dataclasses import dataclass

import torch
from torch import nn

from mprun.data import Splits, TensorSet
from mprun.recipe import Classification


class Model(nn.Module):
    def __init__(self, plant):
        super().__init__()
        self.first, self.middle = nn.Linear(8, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)
        self.plant = plant

    def forward(self, x):
        h = self.first(x)
        if "exp" in self.plant:
            h = h + torch.exp(torch.tanh(h) + 12).mean(-1, keepdim=True) / 2e5
        h = self.middle(h)
        if "reciprocal" in self.plant:
            h = h + 1e-3 * torch.reciprocal(torch.sigmoid(h) * 1e-3 + 1e-3)
        return self.last(torch.relu(h))


@dataclass(frozen=True)
class Classes(Classification):
    plant: str

    def model(self):
        return Model(self.plant)

    def data(self, request):
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(160, 8, generator=draw)
        samples = TensorSet(x, x[:, :3].argmax(1))
        kept = 160 - round(160 * request.validation_fraction)
        train, validation = samples.split(kept)
        broken = TensorSet(x * float("nan"), samples.targets)  # of no use to who looks at it
        return Splits("three of eight", "generated", train, validation, broken)

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1])
"""
QUICK = ["search_ops.batches=2", "search_ops.warmup_steps=3"]
LINEAR = [
    *("recipe=linear", "recipe.model.in_features=8", "recipe.model.out_features=4"),
    *("recipe.model.samples=16", "train.batch_size=16", "device=cpu"),
]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's recipe in the current folder, and a terminal of 200 columns."""
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/planted.yaml").write_text(RECIPE.format(plant="none"), encoding="utf-8")
    Path("planted.py").write_text(CODE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def words(plant: str, *more: str, precision: str = "fp16_mixed") -> list[str]:
    of_the_run = ["recipe=planted", f"precision={precision}", f"recipe.model.plant={plant}"]
    return ["--config-dir", "conf", *of_the_run, "device=cpu", *more]


def search(*more: str) -> dict[str, Any]:
    """`search_ops.json` of a search into the folder `found`."""
    assert main(["search-ops", *more, "run.dir=found"]) == 0
    return read()


_made: dict[tuple[str, ...], tuple[str, dict[str, bytes]]] = {}
"""What a search of these words printed, and its files."""


def searched(plant: str, *more: str) -> dict[str, Any]:
    """The same for the planted recipe as it is: the same words are searched once."""
    asked = (plant, *more)
    if asked not in _made:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            search(*words(plant, *QUICK, *more))
        files = [path for path in Path("found").rglob("*") if path.is_file()]
        _made[asked] = out.getvalue(), {str(path): path.read_bytes() for path in files}
    out_text, contents = _made[asked]
    print(out_text, end="")
    for name, content in contents.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    return read()


def read() -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = Path("found/search_ops.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert msgspec.convert(found, OpSearch, strict=False).rows  # every field has its type
    return found


# ---- what it finds -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plant", "expected"), [("none", []), ("exp_reciprocal", ["exp", "reciprocal"])]
)
def test_the_planted_ops_are_on_the_list(plant: str, expected: list[str]) -> None:
    found = searched(plant)
    assert sorted(found["answer"]["high"]) == expected
    assert found["answer"]["harm"] <= 1
    lists = yaml.safe_load(Path("found/ops.yaml").read_text(encoding="utf-8"))
    assert sorted(lists["fp32"]) == expected
    row = found["everything_lower"]
    assert math.isfinite(float(row["worst_db"])) == (not expected)


def test_the_files_read_back_give_the_lists_that_were_measured() -> None:
    found = searched("exp")
    files = [f"op_lists.{kind}_file=found/ops.yaml" for kind in ("lower", "fp32")]
    composed = compose(
        words("exp", "op_lists=hmp", *files, "op_lists.strict=true")[2:], Path("conf")
    )
    read_back = make_plan(composed.config, ()).op_lists
    assert read_back is not None
    promote = compose(["recipe=mnist", "op_lists=hmp"]).config.op_lists.promote
    lower = [name for name in found["lower"] if name != "exp"]
    assert read_back.rules == op_lists(lower, ["exp"], promote).rules
    assert (read_back.first_input, read_back.unknown) == (True, ())


def test_the_command_it_ends_with_runs_and_the_loss_is_finite(
    capsys: pytest.CaptureFixture[str],
) -> None:
    searched("exp")
    out = capsys.readouterr().out
    (line,) = (x for x in out.splitlines() if x.startswith("use it: "))
    program, *command = shlex.split(line.removeprefix("use it: "))
    assert program == "mprun"
    assert main([*command, "run.dir=run"]) == 0
    loss = read_summary(Path("run")).train.loss
    assert loss is not None
    assert math.isfinite(float(loss))


def test_the_mode_is_bf16_mixed_unless_one_is_named() -> None:
    overrides = [
        "--config-dir",
        "conf",
        "recipe=planted",
        "device=cpu",
        *QUICK,
    ]
    assert main(["search-ops", *overrides, "run.dir=found"]) == 0
    assert (read()["precision"], read()["low"]) == ("bf16_mixed", "bfloat16")
    assert main(["search-ops", *overrides, "op_lists=hmp", "run.dir=hmp"]) == 0
    assert json.loads(Path("hmp/search_ops.json").read_text())["given_name"] == "hmp"


def test_what_the_configuration_has_is_measured_beside() -> None:
    """autocast's lists for the CPU leave exp alone: it follows its input into float16."""
    found = searched("exp")
    assert found["given_name"] == "autocast"
    assert not math.isfinite(float(found["given"]["loss_difference"]))


@pytest.mark.representative(0)
@pytest.mark.parametrize("options", [["execution=emulated"], ["loss_scale=static"]], ids=str)
def test_emulated_arithmetic_and_other_loss_scales_are_measured_as_they_are(
    options: list[str],
) -> None:
    found = searched("exp", *options)
    assert found["answer"]["high"] == ["exp"]
    scale = found["answer"]["measure"]["loss_scale"]
    assert (scale == 1024) == (options == ["loss_scale=static"])


# ---- which samples -------------------------------------------------------------------------------


def test_where_there_is_no_validation_data_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*LINEAR, "precision=bf16_mixed", *QUICK]
    assert main(["search-ops", *words, "run.dir=found"]) == 0
    out = capsys.readouterr().out
    assert "note: recipe=linear has no validation data: measured on training data" in out
    assert read()["measured_on"]["split"] == "train"


# ---- what ends it early --------------------------------------------------------------------------


def test_ctrl_c_leaves_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = JobProgress.begin

    def interrupting(self: JobProgress, text: str, done: int = 0, total: int | None = None) -> None:
        begin(self, text, done, total)
        if text.startswith("op ") and done == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(JobProgress, "begin", interrupting)
    assert main(["search-ops", *words("exp", *QUICK), "run.dir=found"]) == 130
    assert capsys.readouterr().err.endswith("mprun: stopped by Ctrl-C before the first result\n")


# ---- what it refuses -----------------------------------------------------------------------------


def test_layers_of_their_own_are_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["precision.layers={first: fp32}", "run.dir=found"]
    assert main(["search-ops", *words("none", *QUICK, *more)]) == 2
    assert "takes neither precision.layers nor" in capsys.readouterr().err
    assert not Path("found/search_ops.json").exists()


def test_a_model_that_is_not_finite_in_float32_cannot_be_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = CODE.replace("cross_entropy(output, ", "cross_entropy(output / 0, ")
    Path("planted.py").write_text(code, encoding="utf-8")
    more = [*QUICK, "search_ops.warmup_steps=0", "run.dir=found"]
    assert main(["search-ops", *words("none", *more)]) == 2
    err = capsys.readouterr().err
    assert "the model cannot be measured: in float32 the loss of batch 0 is nan" in err
