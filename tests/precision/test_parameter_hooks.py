"""Gradient hooks and attributes of a model's parameters outlive the conversion to a mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.precision.convert import convert
from tests.each import each

pytestmark = pytest.mark.usefixtures("native_is_fast")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RECIPE = """
import torch
import torch.nn.functional as F
from torch import nn

METRIC = ("loss", "min")

def model():
    network = nn.Linear(4, 1)
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    network.weight.register_hook(lambda gradient: gradient * mask.to(gradient.dtype))
    return network

def data():
    x = torch.linspace(-1, 1, 64).view(16, 4)
    return {"train": (x, x[:, :1] + 2)}

def loss(output, batch):
    return F.mse_loss(output.float(), batch[1])

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@each("dtype", DTYPES)
def test_a_hook_changes_the_gradient(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 1)
    handle = model.weight.register_hook(lambda gradient: gradient * 0)
    convert(model, CPU, dtype)
    assert not _gradient(model, dtype).any()
    handle.remove()
    assert _gradient(model, dtype).all()


@each("dtype", DTYPES)
def test_a_hook_after_accumulation_gets_the_converted_parameter(dtype: torch.dtype) -> None:
    model, seen = nn.Linear(4, 1), list[Tensor]()
    model.weight.register_post_accumulate_grad_hook(seen.append)
    convert(model, CPU, dtype)
    _gradient(model, dtype)
    assert len(seen) == 1
    assert seen[0] is model.weight


def test_attributes_and_ties_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].weight.no_decay = True  # type: ignore[assignment]
    convert(model, CPU, torch.bfloat16)
    assert model[1].weight is model[0].weight
    assert model[0].weight.no_decay


@pytest.mark.representative("fp16_mixed", "bf16_sr", "half_sr")
@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed", "fp16_mixed", "bf16_sr", "half_sr"])
def test_masked_weights_stay_as_they_were_drawn(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("masked.py").write_text(RECIPE, encoding="utf-8")
    words = (f"precision={mode}", "train.batch_size=8", "loss_scale.value=256", "device=cpu")
    weights = []
    for steps in (1, 4):
        run = ("train", "recipe=masked.py", *words, f"train.max_steps={steps}", f"run.dir=r{steps}")
        assert main([*run]) == 0
        weights.append(_weight(Path(f"r{steps}")))
    before, after = weights
    assert torch.equal(before[:, 1::2], after[:, 1::2])
    assert not torch.equal(before[:, ::2], after[:, ::2])


def _gradient(model: nn.Module, dtype: torch.dtype) -> Tensor:
    model.zero_grad()
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    gradient = model.get_parameter("weight").grad
    assert gradient is not None
    assert gradient.dtype == dtype
    return gradient


def _weight(run: Path) -> Tensor:
    file = sorted((run / "checkpoints").iterdir())[-1]
    saved = torch.load(file, weights_only=True)
    return next(v for k, v in saved["trainer"]["model"].items() if k.endswith("weight"))
