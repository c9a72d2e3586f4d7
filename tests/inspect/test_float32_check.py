"""Whether float32 itself is good enough: the loss of the same ops in float64, and the op."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.inspect.float32_check import Region, float32_loss, is_good_enough
from mprun.inspect.float64 import in_float64
from mprun.inspect.numerics import Float32Loss

pytestmark = pytest.mark.usefixtures("quick_runs")

Loss = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x))


def variance(h: Tensor) -> Tensor:
    h = h + 3000
    return ((h * h).mean(-1) - h.mean(-1) ** 2).abs().mean()


def divergence(h: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shift = torch.randn(64, generator=generator) * 3e-5
    p, q = h.log_softmax(-1), (h + shift).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def masked_mean(h: Tensor) -> Tensor:
    mask = torch.ones_like(h)
    mask[3] = 0.0  # one sample has no token
    return ((h * mask).sum(-1) / mask.sum(-1)).square().mean()


def harmless(h: Tensor) -> Tensor:
    return nn.functional.dropout(h, 0.5).square().mean()


def branching(h: Tensor) -> Tensor:
    return h.square().mean() if h.dtype is torch.float32 else h.abs().mean()


def checked(loss: Loss) -> Float32Loss | None:
    """float32 beside an oracle that knows nothing of mprun's float64: a model of doubles."""
    model, x = Model(loss), torch.randn(16, 64, generator=torch.Generator().manual_seed(2))

    def run(inside: Region) -> float:
        torch.manual_seed(3)
        with inside(model):
            value = model(x)
            value.backward()
        model.zero_grad()
        return value.item()

    def plain(m: nn.Module, data: Tensor) -> float:
        torch.manual_seed(3)
        return m(data).item()

    low = plain(model, x)
    found = float32_loss(low, plain(Model(loss).double(), x.double()), run)
    assert all(p.dtype is torch.float32 and p.grad is None for p in model.parameters())
    return found


@pytest.mark.parametrize(
    ("loss", "op", "low", "high"),
    [
        (variance, "sub", 0.1, 1),  # of a linear layer's outputs
        (divergence, "sum", 0, 1e-9),
        (masked_mean, "div", math.nan, math.nan),  # in every format
    ],
)
def test_the_op_that_loses_the_loss_is_named(loss: Loss, op: str, low: float, high: float) -> None:
    found = checked(loss)
    assert found is not None
    assert not is_good_enough(found)
    assert found.op == op
    if math.isnan(low):
        assert math.isnan(found.loss)
        assert math.isnan(found.float64)
    else:
        assert low < found.float64 < high
        assert abs(found.loss - found.float64) > 0.1 * found.float64


def test_a_harmless_loss_is_good_enough_and_its_dropout_the_same() -> None:
    model, x = Model(harmless), torch.ones(16, 64)

    def run(inside: Region) -> float:
        torch.manual_seed(3)
        with inside(model):
            return model(x).item()

    found = float32_loss(run(lambda m: torch.enable_grad()), run(in_float64), run)
    assert found is not None
    assert is_good_enough(found)
    assert found.op == ""


def test_a_model_that_branches_on_the_dtype_is_another_one() -> None:
    assert checked(branching) is None


def test_random_numbers_that_are_not_followed_prove_nothing() -> None:
    calls = []

    def drifting(h: Tensor) -> Tensor:
        calls.append(h)
        return (h * len(calls)).mean()

    assert checked(drifting) is None


@pytest.mark.parametrize(
    ("loss", "float64", "enough"),
    [(1.0, 1.005, True), (1.0, 1.02, False), (math.nan, 1.0, False), (0.0, 0.0, True)],
)
def test_the_tolerance_is_that_of_16_bit_formats(loss: float, float64: float, enough: bool) -> None:
    assert is_good_enough(Float32Loss(loss, float64, "", "")) == enough


RECIPE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        h = self.layer(x) + {offset}
        return {output}

def model():
    return Model()

def data():
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    return {{"train": (x, torch.zeros(64)), "validation": (x, torch.zeros(64))}}

def loss(output, batch):
    return {loss}
"""
VARIANCE = {"output": "(h * h).mean(-1) - h.mean(-1) ** 2", "loss": "output.abs().mean()"}
CENTRED = {"output": "h - h.mean(-1, keepdim=True)", "loss": "10 + output.square().mean()"}


@pytest.mark.parametrize(("offset", "enough"), [(0, True), (6e6, False)])
def test_gradients_that_float32_loses_under_a_right_loss(
    offset: float, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 6e6 numbers of float32 are 0.5 apart, like the outputs; the 10 hides it in the loss."""
    monkeypatch.chdir(tmp_path)
    source = RECIPE.format(offset=offset, **CENTRED)
    Path("centred.py").write_text(source, encoding="utf-8")
    words = ["recipe=centred.py", "train.batch_size=16", "numerics.steps=1", "run.dir=out"]
    assert main(["numerics", *words]) == 0
    verdict = json.loads(next(Path("out").rglob("numerics.json")).read_text())["verdict"]
    assert verdict["float32"] is None
    found = verdict["float32_gradients"]
    assert (found is None) == enough
    if found is not None:
        assert found["db"] < 20
        assert found["worst"] == "layer.weight"
        assert true_db(source) < 20  # a model of doubles, which mprun has no part in
    else:
        assert true_db(source) > 60


def true_db(source: str) -> float:
    """The SQNR of float32's gradients of the recipe's first batch beside a model of doubles."""
    names: dict[str, Any] = {}
    exec(source, names)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = names["model"]().to(dtype)
        x = names["data"]()["train"][0][:16].to(dtype)
        names["loss"](model(x), None).backward()
        gradients.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
    low, exact = gradients
    return 20 * math.log10(float(exact.norm() / (low - exact).norm()))


@pytest.mark.parametrize(("offset", "enough"), [(0, True), (3000, False)])
def test_the_answer_of_the_command(
    offset: int,
    enough: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("var.py").write_text(RECIPE.format(offset=offset, **VARIANCE), encoding="utf-8")
    words = ["recipe=var.py", "train.batch_size=16", "numerics.steps=1", "run.dir=out"]
    assert main(["numerics", *words]) == 0
    output = capsys.readouterr().out
    verdict = json.loads(next(Path("out").rglob("numerics.json")).read_text())["verdict"]
    assert (verdict["float32"] is None) == enough
    assert ("float32 itself is not good enough here: the loss is" in output) != enough
    if not enough:
        assert verdict["float32"]["op"] == "sub"
        assert "; sub loses it." in output
        assert "are both good enough" not in output
        assert verdict["reference"]["name"] == "float64"
