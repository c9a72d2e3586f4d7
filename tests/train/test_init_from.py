"""Beginning with weights of an earlier run: whose bits, in which mode, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.config import compose
from mprun.precision import Policy
from mprun.records.files import write_atomic
from mprun.records.run_record import read_lines, read_summary
from mprun.train import checkpoint
from mprun.train.assemble import build_parts, make_plan
from mprun.train.data import Batch
from mprun.train.init_from import (
    DRAWN,
    Weights,
    load_weights,
    range_warning,
    with_tied,
)
from mprun.train.loop import StepResult, Trainer
from tests.run import test_resume
from tests.run.test_resume import assert_equal

pytestmark = pytest.mark.usefixtures("quick_runs")

LINEAR = ["recipe=linear", "recipe.model.in_features=8", "recipe.model.out_features=4"]
MNIST = [
    "recipe=mnist",
    "recipe.model.units=16",
    "data.source=generated",
    "data.train_limit=300",
    "data.eval_limit=32",
    "train.batch_size=32",
]
PARAMETERS = 784 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10


def final_weights(run: str) -> dict[str, Tensor]:
    """The weights a run ended with."""
    return dict(test_resume.trained(Path(run))["model"])


def first_weights(*words: str) -> dict[str, Tensor]:
    """The weights a run of these words would begin with."""
    parts = build_parts(make_plan(compose(words).config, {}))
    return {key: x.clone() for key, x in parts.model.state_dict().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[str], str]:
    """The folder of a short mnist run in a mode."""

    def run(mode: str) -> str:
        path = folder / mode
        if not path.exists():
            words = [*MNIST, f"precision={mode}", "train.max_steps=5", f"run.dir={path}"]
            assert main(words) == 0
        return str(path)

    return run


@pytest.fixture(scope="module")
def linear(folder: Path) -> str:
    """The folder of a short linear run."""
    assert main([*LINEAR, "train.max_steps=3", f"run.dir={folder / 'linear'}"]) == 0
    return str(folder / "linear")


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The weights before each run's first step, as the loop has them."""
    result: list[dict[str, Tensor]] = []
    plain = Trainer.optimizer_step

    def step(self: Trainer, batch: Batch) -> StepResult:
        if self.step == 0:
            result.append({k: x.clone() for k, x in self.parts.model.state_dict().items()})
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "optimizer_step", step)
    monkeypatch.setattr("mprun.train.run.footprint", lambda *_: ({}, None))  # takes steps too
    return result


def left() -> list[Path]:
    """The files of the current folder, bytecode apart."""
    return sorted(p for p in Path().rglob("*") if "__pycache__" not in p.parts)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which these words are refused, before any folder is made."""
    capsys.readouterr()
    before = left()
    assert main([*words]) == 2
    output = capsys.readouterr()
    lines = [x for x in output.err.strip().splitlines() if not x.startswith("note: ")]
    assert len(lines) == 1
    assert output.out == ""
    assert left() == before
    return lines[0]


def printed_by(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """stdout and stderr of a run of these words, which goes well."""
    capsys.readouterr()
    assert main([*words]) == 0
    output = capsys.readouterr()
    return output.out, output.err


# What a run begins with


@pytest.mark.representative("fp16_mixed")
@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed", "fp16_mixed", "tf32"])
def test_the_first_step_has_the_bits_the_source_ended_with(
    trained: Callable[[str], str], mode: str, begins: list[dict[str, Tensor]]
) -> None:
    source = trained("fp32")
    words = [*MNIST, f"precision={mode}", "seed=7", "train.max_steps=2", "run.dir=run"]
    assert main([*words, f"train.init_from={source}"]) == 0
    assert_equal(begins[-1], final_weights(source))
    assert not torch.equal(final_weights("run")["0.weight"], begins[-1]["0.weight"])
    assert read_summary(Path("run")).steps == 2
    assert [x["step"] for x in read_lines(Path("run")) if x["kind"] == "step"] == [1, 2]


def test_folder_checkpoint_and_plain_file_are_one_source(linear: str) -> None:
    wanted = final_weights(linear)
    torch.save(wanted, "plain.pt")
    for path in (linear, str(checkpoint.path_in(Path(linear))), "plain.pt"):
        assert_equal(first_weights(*LINEAR, "seed=5", f"train.init_from={path}"), wanted)
    drawn = first_weights(*LINEAR, "seed=5")
    assert not torch.equal(drawn["weight"], wanted["weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_widths_become_float32(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 4).to(dtype)
    torch.save(model.state_dict(), "plain.pt")
    result = first_weights(*LINEAR, "train.init_from=plain.pt")
    assert_equal(result, {k: x.float() for k, x in model.state_dict().items()})
    if dtype is not torch.float64:
        for key, tensor in model.state_dict().items():
            assert torch.equal(result[key].to(dtype), tensor)


def test_buffers_and_counters_come_along() -> None:
    Path("norm.py").write_text(
        "from dataclasses import dataclass\n"
        "from mprun.recipes.linear import Linear\n"
        "from torch import nn\n"
        "@dataclass(frozen=True)\n"
        "class Norm(Linear):\n"
        "    def model(self):\n"
        "        return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))\n",
        encoding="utf-8",
    )
    words = [*LINEAR, "recipe.target=norm.Norm", "train.max_steps=3"]
    assert main([*words, "run.dir=run"]) == 0
    source = final_weights("run")
    assert int(source["1.num_batches_tracked"]) == 3
    assert_equal(first_weights(*words, "train.init_from=run"), source)


def test_random_numbers_and_order_are_those_of_a_run_without(linear: str) -> None:
    def state(*words: str) -> tuple[Tensor, Tensor | None]:
        chosen = make_plan(compose([*MNIST, *words]).config, {})
        parts = build_parts(chosen)
        return torch.get_rng_state(), parts.order.draw()

    torch.save(first_weights(*MNIST, "seed=3"), "plain.pt")
    without, with_them = state(), state("train.init_from=plain.pt")
    assert torch.equal(without[0], with_them[0])
    assert without[1] is not None
    assert with_them[1] is not None
    assert torch.equal(without[1], with_them[1])


def test_a_source_is_not_changed_by_training(linear: str) -> None:
    chosen = make_plan(compose([*LINEAR, f"train.init_from={linear}"]).config, {})
    for _ in range(2):
        parts = build_parts(chosen)
        assert_equal(dict(parts.model.state_dict()), final_weights(linear))
        with torch.no_grad():
            for parameter in parts.model.parameters():
                parameter.add_(1)


# Files of other programs


def linear_state(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(4)
    return dict(nn.Linear(8, 4).to(dtype).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_are_a_source(dtype: torch.dtype) -> None:
    state = linear_state(dtype)
    Path("hub").mkdir()
    save_file(state, "hub/model.safetensors")
    wanted = {key: x.float() for key, x in state.items()}
    for source in ("hub/model.safetensors", "hub"):
        assert_equal(first_weights(*LINEAR, f"train.init_from={source}"), wanted)
    loaded = load_weights("hub", make_plan(compose(LINEAR).config, {}).recipe, "linear")
    assert loaded.dtypes == {str(dtype).removeprefix("torch.")}


def test_divided_safetensors_are_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    state = linear_state()
    index = Path("hub/model.safetensors.index.json")
    index.parent.mkdir()
    for key, tensor in state.items():
        save_file({key: tensor}, f"hub/{key}.safetensors")
    index.write_text(json.dumps({"weight_map": {key: f"{key}.safetensors" for key in state}}))
    for source in ("hub", str(index)):
        assert_equal(first_weights(*LINEAR, f"train.init_from={source}"), state)
    Path("hub/bias.safetensors").unlink()
    assert "cannot be read (No such file" in refused(capsys, *LINEAR, "train.init_from=hub")
    os.mkfifo("hub/bias.safetensors")  # to open it would wait for a writer
    assert "it is not a regular file" in refused(capsys, *LINEAR, "train.init_from=hub")
    for content in ('{"weight_map": {"a": "../x.safetensors"}}', "{}", "[", '{"weight_map": {}}'):
        index.write_text(content)
        line = refused(capsys, *LINEAR, "train.init_from=hub")
        assert "is damaged: it" in line


def test_damaged_safetensors(capsys: pytest.CaptureFixture[str]) -> None:
    save_file(linear_state(), "whole.safetensors")
    content = Path("whole.safetensors").read_bytes()
    for damaged in (b"", content[:-5], b"\xff" * 64, content[8:]):
        Path("x.safetensors").write_bytes(damaged)
        line = refused(capsys, *LINEAR, "train.init_from=x.safetensors")
        assert "x.safetensors is damaged: " in line


def test_a_tied_parameter_is_saved_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    saved = {k: x for k, x in model.state_dict().items() if k != "b.weight"}
    whole = with_tied(saved, model)
    assert whole.keys() == model.state_dict().keys()
    assert whole["b.weight"] is saved["a.weight"]


# The record


def test_it_is_recorded_and_makes_a_variant(
    linear: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LINEAR, "train.max_steps=2", "run.dir=a"]) == 0
    words = [*LINEAR, "train.max_steps=2", f"train.init_from={linear}", "run.dir=b"]
    out, _ = printed_by(capsys, *words)
    assert f"\nweights: {linear}\n" in out
    assert f"  init_from: {linear}\n" in Path("b/config.yaml").read_text(encoding="utf-8")
    a, b = read_summary(Path("a")), read_summary(Path("b"))
    assert a.variant_hash != b.variant_hash
    assert a.memory_bytes == b.memory_bytes
    assert b.memory_bytes.peak is not None


# Resuming


def test_a_resumed_run_needs_the_file_no_more(
    trained: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(trained("bf16_mixed"), "source")
    words = [*MNIST, "precision=fp16_mixed", f"train.init_from={source}"]
    assert main([*words, "train.max_steps=20", "run.dir=whole"]) == 0
    assert main([*words, "train.max_steps=7", "run.dir=run"]) == 0
    shutil.rmtree("source")
    out, err = printed_by(capsys, "run.resume=run", "train.max_steps=20")
    assert "weights: " not in out
    assert err == ""
    assert_equal(final_weights("run"), final_weights("whole"))
    assert "init_from: source" in Path("run/config.yaml").read_text(encoding="utf-8")


def test_a_run_without_a_checkpoint_begins_with_them_again(
    linear: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(linear, "source")
    words = [*LINEAR, "train.max_steps=6", f"train.init_from={source}"]
    assert main([*words, "run.dir=whole"]) == 0

    def crash(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", crash)
        assert main([*words, "run.dir=run"]) == 1
    shutil.move("source", "elsewhere")
    line = refused(capsys, "run.resume=run")
    assert "train.init_from=source: source cannot be read (No such file or directory)" in line
    shutil.move("elsewhere", "source")
    assert main(["run.resume=run"]) == 0
    assert_equal(final_weights("run"), final_weights("whole"))


# What is refused


def test_no_such_path(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, *LINEAR, "train.init_from=nowhere")
    assert "nowhere cannot be read (No such file or directory); legal is a run's folder" in line
    Path("young").mkdir()
    line = refused(capsys, *LINEAR, "train.init_from=young")
    assert "train.init_from=young: young/checkpoints/last.pt cannot be read (No such file" in line


def test_a_damaged_file(linear: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = checkpoint.path_in(Path(linear)).read_bytes()
    for damaged, reason in (
        (whole[: len(whole) // 2], "is damaged: it is not a complete zip archive: "),
        (b"", "is damaged: it is empty; "),
        (b"no checkpoint", "is damaged: it is no archive, as torch.save writes"),
    ):
        Path("file.pt").write_bytes(damaged)
        line = refused(capsys, *LINEAR, "train.init_from=file.pt")
        assert f"train.init_from=file.pt: file.pt {reason}" in line
        assert "legal is a run's folder" in line


def test_a_file_with_code_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(nn.Linear(8, 4), "model.pt")
    line = refused(capsys, *LINEAR, "train.init_from=model.pt")
    assert "contains more than tensors and plain values, which is not loaded" in line
    assert "torch.save(model.state_dict(), path)" in line


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
@pytest.mark.parametrize(
    "result",
    [
        [1],
        {"weight": 1.0},
        {"weight": torch.zeros(4, 8, device="meta"), "bias": torch.zeros(4)},
        {"weight": torch.zeros(4, 8).to_sparse(), "bias": torch.zeros(4)},
        {"format_version": 1, "trainer": {}, "journal": {}, "choices": {}},
    ],
    ids=range(5),
)
def test_no_weights_by_name(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(result, "file.pt")
    line = refused(capsys, *LINEAR, "train.init_from=file.pt")
    assert "train.init_from=file.pt contains no weights by name; legal is a run's folder" in line


def test_names_that_do_not_fit(
    linear: str, trained: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = trained("fp32")
    line = refused(capsys, *LINEAR, f"train.init_from={source}")
    assert "do not fit the model of recipe=linear (they are from recipe=mnist): missing we" in line
    assert "unexpected 0.weight, 0.bias, 2.weight and 3 more; give the recipe" in line
    torch.save({"weight": torch.zeros(4, 8)}, "file.pt")
    line = refused(capsys, *LINEAR, "train.init_from=file.pt")
    assert "do not fit the model of recipe=linear: missing bias; give the recipe" in line


def test_shapes_that_do_not_fit(linear: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=linear", "recipe.model.in_features=8", "recipe.model.out_features=5"]
    line = refused(capsys, *words, f"train.init_from={linear}")
    assert "recipe=linear: weight is float32 [4, 8], not float32 [5, 8], bias is " in line


def test_nan(capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    weight[1, 2] = weight[3, 0] = torch.nan
    torch.save({"weight": weight, "bias": torch.zeros(4)}, "file.pt")
    line = refused(capsys, *LINEAR, "train.init_from=file.pt")
    assert line == (
        "mprun: train.init_from=file.pt: weight contains NaN (2 of 32 values); take weights from "
        "before training broke down"
    )


# From bfloat16's range to float16's

WARNING = (
    "warning: these weights were trained in bfloat16 and continue in float16, whose range is "
    "smaller: "
)


def test_planted_weights_are_counted(
    trained: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(trained("bf16_mixed"), "source"))
    state = torch.load(checkpoint.path_in(path), weights_only=True)
    assert state["effective"]["param_dtype"] == "float32"
    assert state["effective"]["compute_dtype"] == "bfloat16"
    for weight in state["trainer"]["model"].values():
        weight.fill_(0.5)
    state["trainer"]["model"]["2.weight"][0, :6] = torch.tensor([1e5, 1e-9, -1e-9, 1e-5, 3e-6, 0])
    write_atomic(checkpoint.path_in(path), checkpoint.serialized(state))
    words = [*MNIST, "precision=fp16_mixed", "train.init_from=source"]
    (result,) = make_plan(compose(words).config, {}).warnings
    assert result.removeprefix(WARNING.removeprefix("warning: ")) == (
        f"1 of {PARAMETERS:,} overflow (0.008 %), 2 become zero (0.015 %), "
        "2 become subnormal, with fewer bits (0.015 %); precision=bf16_mixed or bf16_true keeps it"
    )


def policy_of(mode: str) -> Policy:
    return make_plan(compose([*LINEAR, f"precision={mode}"]).config, {}).policy


def test_weights_trained_in_bfloat16_are_always_warned_about() -> None:
    state = {"a.weight": torch.full((3,), 1e5), "b.weight": torch.ones(2), "b.mean": torch.ones(9)}
    weights = Weights(state, ("a.weight", "b.weight"), frozenset({"float32", "bfloat16"}))
    float16 = policy_of("fp16_mixed")
    assert "3 of 5 overflow (60 %)" in str(range_warning(weights, float16, {}))
    assert "0 of 2 overflow" in str(range_warning(weights, float16, {"a": "fp32"}))
    assert range_warning(weights, float16, {"a": "fp32", "b": "bf16"}) is None
    assert range_warning(weights, policy_of("bf16_mixed"), {}) is None
    assert range_warning(DRAWN, float16, {}) is None


@pytest.mark.representative(
    "fp16_true-*", "half_sr-True-65520.0*", "fp32 *-True-65520.0*", "fp32-False-65520.0*"
)
@pytest.mark.parametrize(
    ("value", "count", "warned"),
    [
        (1e5, 1, True),
        (65520.0, 1, True),
        (65519.0, 2000, False),
        (1e-9, 3, True),
        (1e-9, 2, False),  # one in a thousand is allowed
        (1e-6, 2000, False),  # subnormal: fewer bits, but within the range
    ],
)
@pytest.mark.parametrize(
    ("mode", "reaches_float16"),
    [
        ("fp16_true", True),
        ("fp16_mixed", True),
        ("half_sr", True),
        ("fp32 'precision.layers={a: fp16}'", True),
        ("fp32", False),
        ("bf16_true", False),
    ],
)
def test_float32_weights_outside_of_float16_are_warned_about(
    value: float, count: int, warned: bool, mode: str, reaches_float16: bool
) -> None:
    """Where they are stored or computed in float16; the counts are numpy's, of the real values."""
    weight = torch.full((2000,), 0.5)
    weight[:count] = value
    precision, _, layers = mode.partition(" ")
    row = policy_of(precision)
    weights = Weights({"a.weight": weight}, ("a.weight",), frozenset({"float32"}))
    result = range_warning(weights, row, {"a": "fp16"} if layers else {})
    with np.errstate(over="ignore"):
        after = weight.numpy().astype(np.float16)
    overflow, zero = int(np.isinf(after).sum()), int((after == 0).sum())
    if not (warned and reaches_float16):
        assert result is None
        return
    assert result is not None
    assert f"{overflow:,} of 2,000 overflow" in result
    assert f"{zero:,} become zero" in result
