"""`precision=fp64` and L-BFGS: bit for bit a loop by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.raw_loop import raw_optimizer
from mprun.cli.main import main
from mprun.config import compose
from mprun.config.settings import variants
from mprun.errors import UsageError
from mprun.precision.execution import executions
from mprun.precision.policy import policy
from mprun.records.run_record import read_lines, read_summary
from mprun.train.assemble import build_parts, make_plan
from mprun.train.loop import Limits, Trainer

FITTED = """
import torch
from torch import nn

DEFAULTS = {"train.batch_size": 32, "train.epochs": 6, "train.lr": 1.0}


def model():
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def data():
    x = torch.linspace(-1, 1, 32)[:, None]
    return {"train": (x, torch.sin(3 * x)), "test": (x, torch.sin(3 * x))}


def loss(output, batch):
    return (output - batch[1]).square().mean()


def optimizer(model):
    return torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5)
"""


@pytest.fixture
def fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("fitted.py").write_text(FITTED)
    return "recipe=fitted.py"


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop"])
@pytest.mark.parametrize("recipe", ["mnist", "linear"])  # classes, and targets that are numbers
def test_a_run_is_a_loop_by_hand(recipe: str, name: str) -> None:
    words = [f"recipe={recipe}", "precision=fp64", "speed=plain", "device=cpu"]
    words += ["data.source=generated", "train.batch_size=16", f"train.optimizer.name={name}"]
    plan = make_plan(compose([*words, "train.clip_norm=1.0"]).config, ())
    parts, model = build_parts(plan), build_parts(plan).model
    optimizer, trainer = raw_optimizer(plan, model), Trainer(parts, Limits(None, None, None))
    batches = iter(parts.train.epoch(None))
    for _ in range(3):
        batch = next(batches).trained
        trainer.optimizer_step(batch)
        content = batch.parts[0].content
        assert all(x.dtype in (torch.float64, torch.int64) for x in content)
        optimizer.zero_grad()
        loss = plan.recipe.loss(plan.recipe.forward(model, batch.parts[0].inputs), content)
        assert loss.dtype == torch.float64
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    kept = [x for state in parts.optimizer.state.values() for x in state.values()]
    assert all(x.dtype == torch.float64 for x in kept if isinstance(x, Tensor) and x.dim())
    for ours, theirs in zip(parts.model.parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.float64
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", ["fp64", "fp32"])
def test_lbfgs_is_a_loop_by_hand(mode: str, fitted: str) -> None:
    plan = make_plan(compose([fitted, f"precision={mode}", "device=cpu"]).config, ())
    parts, model = build_parts(plan), build_parts(plan).model
    trainer = Trainer(parts, Limits(None, None, None))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5)
    batch = next(iter(parts.train.epoch(None))).trained
    x, y = batch.parts[0].content

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(3)]
    assert [trainer.optimizer_step(batch).loss for _ in range(3)] == losses
    for ours, theirs in zip(parts.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", ["fp64", "bf16_mixed"])
def test_a_resumed_run_with_lbfgs_is_an_uninterrupted_one(mode: str, fitted: str) -> None:
    words = [fitted, f"precision={mode}", "device=cpu"]
    assert main([*words, "run.dir=whole"]) == 0
    assert main([*words, "run.dir=half", "train.max_steps=3"]) == 0
    assert main([*words, "run.resume=half", "train.max_steps=6"]) == 0
    whole, half = (
        torch.load(f"{x}/checkpoints/last.pt", weights_only=True) for x in ("whole", "half")
    )
    for key, value in whole["trainer"]["model"].items():
        assert torch.equal(value, half["trainer"]["model"][key])
    losses = [[x["loss"] for x in read_lines(Path(run)) if "lr" in x] for run in ("whole", "half")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["precision=bf16_sr"], "which searches along a line"),
        (["precision=fp16_mixed"], "loss_scale=dynamic with LBFGS"),
        (["train.clip_norm=1"], "train.clip_norm=1.0 with LBFGS"),
        (["debug.fp_exceptions=log"], "debug.fp_exceptions=log with LBFGS"),
    ],
)
def test_what_lbfgs_cannot_have_is_refused(more: list[str], text: str, fitted: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_plan(compose([fitted, *more]).config, ())


def test_the_record_says_float64(fitted: str) -> None:
    assert main([fitted, "precision=fp64", "run.dir=run", "train.max_steps=2"]) == 0
    summary = read_summary(Path("run"))
    found = vars(summary.effective)
    columns = [key for key in found if key.endswith("_dtype")]
    assert {found[key] for key in columns} == {"float64"}
    assert found == vars(summary.requested)
    assert (summary.execution, summary.warnings) == ("native", [])
    assert not summary.effective.tf32


def test_float64_is_a_mode_of_a_study_by_name_alone() -> None:
    assert not any("fp64" in name for name in variants([]).overrides)
    assert [*variants(["precision=fp64,fp32"]).overrides] == ["fp64", "fp32"]


def test_what_float64_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="device=mps, which has no float64; legal: device=cpu"):
        executions(policy("fp64"), torch.device("mps"))
    cases: dict[str, Any] = {
        "precision.momentum_dtype=bfloat16": "legal is float64",
        "precision.tf32=true": "legal is false",
        "precision.accum_dtype=float32": "legal is float64",
        "execution=emulated": "runs natively on every device",
    }
    for override, text in cases.items():
        with pytest.raises(UsageError, match=text):
            make_plan(compose(["precision=fp64", override]).config, ())
    assert policy("p=fp64") == policy("fp64") == policy("64-true") == policy("float64")
