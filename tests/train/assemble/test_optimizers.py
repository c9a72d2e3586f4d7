"""Optimizers of a recipe, against raw PyTorch, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

from mprun.cli.main import main
from mprun.config.compose import compose
from mprun.errors import UsageError
from mprun.optim import MasterWeights
from mprun.recipe import Recipe
from mprun.records.run_record import read_summary
from mprun.train.assemble import build_parts, make_plan
from mprun.train.assemble.parts import effective
from mprun.train.checkpoint import path_in
from mprun.train.data import DataRequest, Splits, TensorSet
from mprun.train.loop import Limits, Trainer, TrainingComponents

pytestmark = pytest.mark.usefixtures("quick_runs")

FILED = ["train.batch_size=8", "train.epochs=null", "train.max_steps=4", "device=cpu"]
FILED += ["speed=plain"]
FILE = """
import torch
import torch.nn.functional as F


def model():
    return torch.nn.Linear(8, 4)


def data():
    return {"train": (torch.ones(8, 8), torch.zeros(8, 4)), "validation": None}


def loss(output, batch):
    return F.mse_loss(output, batch[1])


def optimizer(model):
    return torch.optim.OPTIMIZER(model.parameters(), lr=0.05)
"""
HERE = "tests.train.assemble.test_optimizers"


@dataclass(frozen=True)
class Small(Recipe):
    """Two layers; what is frozen and made by the recipe are parameters."""

    frozen: str = ""
    makes: str = "groups"

    METRIC: ClassVar[tuple[str, str]] = ("loss", "min")

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(3, 2))
        model[2].forward = lambda x: x  # has no gradients
        for name, p in model.named_parameters():
            p.requires_grad_(not (self.frozen and name.startswith(tuple(self.frozen.split()))))
        return model

    def data(self, request: DataRequest) -> Splits:
        drawn = torch.Generator().manual_seed(0)
        train = TensorSet(torch.randn(8, 4, generator=drawn), torch.randn(8, 2, generator=drawn))
        return Splits("drawn", "generated", train, train.first(0), train.first(0), shuffle=False)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(output, batch[1])


@dataclass(frozen=True)
class Own(Small):
    """Makes its own optimizer and schedule."""

    def optimizer(self, model: Any) -> Any:
        makers: dict[str, Callable[[], Any]] = {
            "groups": lambda: torch.optim.Adam(
                [
                    {"params": model[0].parameters(), "lr": 0.1},
                    {"params": model[1].parameters(), "weight_decay": 0.5},
                ],
                lr=0.01,
            ),
            "nothing": lambda: None,
            "lbfgs": lambda: torch.optim.LBFGS(model.parameters()),
            "foreign": lambda: torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0),
            "text": lambda: torch.optim.SGD(model.parameters(), lr=1.0),
        }
        return makers[self.makes]()

    def schedule(self, optimizer: Any) -> LRScheduler:
        return "cosine" if self.makes == "text" else StepLR(optimizer, 2, 0.1)  # type: ignore[return-value]


@dataclass(frozen=True)
class Sparse(Own):
    """An embedding with sparse gradients."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 2), nn.Embedding(3, 2, sparse=True))


def planned(*given: str) -> Any:
    composed = compose(given)
    config = composed.config
    if config.recipe.target.startswith(HERE):
        config.recipe.model = {
            k: v for k, v in config.recipe.model.items() if k in ("frozen", "makes")
        }
    return make_plan(config, composed.given)


def small(kind: str, *more: str) -> Any:
    base = ["recipe=linear", f"recipe.target={HERE}.{kind}", "train.batch_size=8", "device=cpu"]
    more = ("train.lr=0.05", *more)
    return planned(*base, "speed=plain", "train.epochs=null", "train.max_steps=4", *more)


def trained(plan: Any, steps: int = 4) -> TrainingComponents:
    parts = build_parts(plan)
    Trainer(parts, Limits(None, steps, None)).fit()
    return parts


def recipe_file(folder: Path, optimizer: str) -> str:
    """A recipe with an optimizer of its own, whose arguments are the parameters and lr."""
    path = folder / "own.py"
    path.write_text(FILE.replace("OPTIMIZER", optimizer), encoding="utf-8")
    return f"recipe={path}"


@pytest.mark.parametrize("kind", ["Adagrad", "Adafactor"])
def test_an_optimizer_of_a_file_is_a_raw_loop(kind: str, tmp_path: Path) -> None:
    parts = trained(planned(recipe_file(tmp_path, kind), *FILED))
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        F.mse_loss(model(torch.ones(8, 8)), torch.zeros(8, 4)).backward()
        optimizer.step()
    for mine, raw in zip(parts.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, raw)
    assert type(parts.optimizer) is type(optimizer)


@pytest.mark.parametrize("mode", ["half_sr", "bf16_true"])
def test_16_bit_parameters_get_masters_and_the_record_says_so(mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = [recipe_file(tmp_path, "Adagrad"), *FILED, f"precision={mode}"]
    assert main([*given, f"run.dir={folder}"]) == 0
    summary = read_summary(folder)
    assert summary.backend.optimizer_impl == "masters"
    assert summary.effective.rounding == ("nearest" if mode == "bf16_true" else "stochastic")
    assert summary.effective.param_dtype == ("float16" if mode == "half_sr" else "bfloat16")
    count = 8 * 4 + 4
    assert summary.memory_bytes.parameters == 2 * count
    assert summary.memory_bytes.optimizer_state == 2 * 4 * count + 2 * 4


@pytest.mark.representative("Adagrad-fp16_mixed", "Adafactor-bf16_sr")
@pytest.mark.parametrize("mode", ["fp32", "fp16_mixed", "bf16_sr"])
@pytest.mark.parametrize("kind", ["Adagrad", "Adafactor"])
def test_a_run_resumes_bit_for_bit(mode: str, kind: str, tmp_path: Path) -> None:
    given = [recipe_file(tmp_path, kind), *FILED, f"precision={mode}"]
    given += ["train.warmup_steps=2", "loss_scale.value=8"] if mode == "fp16_mixed" else []
    half = [*given, "train.max_steps=2"]
    assert main([*given, f"run.dir={tmp_path / 'a'}"]) == 0
    assert main([*half, f"run.dir={tmp_path / 'b'}"]) == 0
    assert main([f"run.resume={tmp_path / 'b'}", "train.max_steps=4"]) == 0
    a, b = (torch.load(path_in(tmp_path / x), weights_only=True) for x in "ab")
    for key, value in a["trainer"]["model"].items():
        assert torch.equal(value, b["trainer"]["model"][key])


def test_a_recipes_own_optimizer_and_schedule_win() -> None:
    given = ["train.lr=7", "train.scheduler=cosine", "train.optimizer.momentum=0.5"]
    plan = small("Own", *given)
    named = [text.split(" ")[0] for text in plan.warnings if "makes its own" in text]
    assert named == ["train.lr", "train.scheduler", "train.optimizer.momentum"]
    assert plan.speed.optimizer_impl == "own"
    parts = trained(plan, 3)
    assert [g["lr"] for g in parts.optimizer.param_groups] == pytest.approx([0.01, 0.001])
    assert [g["weight_decay"] for g in parts.optimizer.param_groups] == [0, 0.5]


def test_a_recipes_own_optimizer_gets_masters() -> None:
    parts = trained(small("Own", "precision=bf16_sr"), 3)
    assert isinstance(parts.optimizer, MasterWeights)
    assert [g["lr"] for g in parts.optimizer.param_groups] == pytest.approx([0.01, 0.001])
    assert all(p.dtype == torch.bfloat16 for p in parts.model.parameters())


@pytest.mark.parametrize(
    ("makes", "text"),
    [
        ("nothing", "optimizer(model) of Own gave a NoneType"),
        ("foreign", "holds no parameter of the model"),
        ("text", "schedule(optimizer) of Own gave a str"),
    ],
)
def test_what_a_recipe_makes_is_checked(makes: str, text: str) -> None:
    with pytest.raises(UsageError) as error:
        small("Own", f"recipe.model.makes={makes}")
    assert text in str(error.value)


@pytest.mark.parametrize("mode", ["fp32", "bf16_sr", "fp16_mixed", "half_sr"])
@pytest.mark.parametrize("kind", ["Small", "Own"])
def test_frozen_and_unused_parameters(mode: str, kind: str) -> None:
    plan = small(kind, "recipe.model.frozen=0", f"precision={mode}")
    before = [p.detach().clone() for p in build_parts(plan).model.parameters()]
    parts = trained(plan)
    held = {id(p) for group in parts.optimizer.param_groups for p in group["params"]}
    for i, (p, old) in enumerate(zip(parts.model.parameters(), before, strict=True)):
        assert (
            p.dtype
            == old.dtype
            == {"bf16_sr": torch.bfloat16, "half_sr": torch.float16}.get(mode, torch.float32)
        )
        assert p.requires_grad == (i >= 2)
        assert torch.equal(p, old) == (i not in (2, 3))
        assert (id(p) in held) == (i >= 2 if kind == "Small" else i in (2, 3))
        assert (p.grad is None) == (i not in (2, 3))
        assert bool(parts.optimizer.state.get(p, {}).get("exp_avg") is not None) == (
            kind == "Own" and i in (2, 3)
        )
    row = effective(plan, parts.model, parts.optimizer, parts.precision)
    assert row.param_dtype == str(before[0].dtype).removeprefix("torch.")


@pytest.mark.parametrize("kind", ["Small", "Own"])
def test_a_model_without_anything_to_train_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=r"all parameters of the model of .* are frozen"):
        small(kind, "recipe.model.frozen='0 1 2'")


def test_sparse_gradients_in_16_bits_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"precision=bf16_sr: 1 makes sparse gradients"):
        small("Sparse", "precision=bf16_sr")
    small("Sparse", "precision=bf16_mixed")
