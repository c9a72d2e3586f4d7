"""mprun adds nothing: its weights are those of a raw PyTorch loop, bit for bit.

`speed=plain`, CPU, same thread count; the tolerance is zero because no operation differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mprun.cli.main import main
from mprun.data import DataRequest, Splits
from mprun.recipes.fashion_mnist import FashionMnist
from mprun.recipes.linear import Linear
from mprun.recipes.mnist import Mnist
from mprun.records.run_record import read_lines
from tests.parity import raw_loop

CASES = {
    "linear": (
        Linear(1024, 512, 64),
        lambda p: torch.optim.SGD(p, lr=1e-3),
        64,
        60,
        0.0,
    ),
    "mnist": (
        Mnist(256),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9, eps=1e-7),
        1024,
        8,
        0.2,
    ),
    "fashion_mnist": (
        FashionMnist(128, 1),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        12,
        20,
        0.0,
    ),
}


@pytest.mark.representative("mnist-bf16_mixed", "linear-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("name", CASES)
def test_weights_equal_a_raw_loop_bit_for_bit(name: str, precision: str) -> None:
    recipe, optimizer, batch_size, steps, held_out = CASES[name]
    words = [f"recipe={name}", f"precision={precision}", "speed=plain", "device=cpu", "run.dir=run"]
    words += [f"train.max_steps={steps}", "data.eval_limit=64", f"train.batch_size={batch_size}"]
    if name != "linear":
        words.append("data.source=generated")
    assert main(words) == 0
    ours = torch.load(Path("run/checkpoints/last.pt"), weights_only=True)["trainer"]["model"]

    request = DataRequest(source="generated", validation_fraction=held_out)
    bf16 = precision == "bf16_mixed"
    raw = raw_loop.train(recipe, recipe.data(request), optimizer, batch_size, steps, bf16)
    for key, value in raw.state_dict().items():
        assert torch.equal(value, ours[key]), f"{key} differs"


def fp16_raw_loop(
    recipe: Mnist, splits: Splits, batch_size: int, steps: int, initial: float, planted: set[int]
) -> tuple[torch.nn.Module, list[bool], float]:
    """torch autocast + GradScaler; the model, which steps were skipped, and the last scale."""
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9, eps=1e-7)
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=4)
    order = torch.Generator().manual_seed(0)
    index = torch.randperm(len(splits.train), generator=order).split(batch_size)
    skipped = []
    for step in range(steps):
        x, y = splits.train.inputs[index[step]], splits.train.targets[index[step]]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(recipe.prepare(x))
        loss = recipe.loss(output.float(), (x, y))
        scaler.scale(loss * (1e6 if step in planted else 1)).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped.append(scaler.get_scale() < before)
    return model, skipped, scaler.get_scale()


@dataclass(frozen=True)
class Planted(Mnist):
    """MNIST whose loss is a million times too large at some steps (its own calls, counted)."""

    steps: ClassVar[set[int]] = {3, 9, 10}
    calls: ClassVar[list[int]] = []

    def loss(self, output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = super().loss(output, batch)
        if output.requires_grad:
            self.calls.append(0)
            if len(self.calls) - 1 in self.steps:
                return loss * 1e6
        return loss


@pytest.mark.representative("planted1")
@pytest.mark.parametrize("planted", [set(), {3, 9, 10}])
def test_fp16_mixed_equals_autocast_with_grad_scaler(
    planted: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights bit for bit; a planted overflow skips the same steps and ends at the same scale.

    Batches of 64: float16 matmuls are reference loops on a CPU without AVX512-FP16.
    """
    monkeypatch.setattr(Planted, "steps", planted)
    monkeypatch.setattr(Planted, "calls", [])
    words = ["recipe=mnist", "precision=fp16_mixed", "speed=plain", "device=cpu", "run.dir=run"]
    words += ["train.batch_size=64", "train.max_steps=14", "data.source=generated"]
    words.append("recipe.model.units=64")
    words += ["data.eval_limit=64", "loss_scale.growth_interval=4", "loss_scale.value=1024"]
    # The footprint runs the step twice on fake tensors; those calls are not the run's.
    monkeypatch.setattr("mprun.run.footprint", lambda plan: ({}, None))
    target = f"recipe.target={__name__}.Planted"
    assert main([*words, "loss_scale=dynamic", target]) == 0
    state = torch.load(Path("run/checkpoints/last.pt"), weights_only=True)["trainer"]
    lines = [x for x in read_lines(Path("run")) if x["kind"] == "step"]

    splits = Mnist(64).data(DataRequest(source="generated", validation_fraction=0.2))
    raw, skipped, scale = fp16_raw_loop(Mnist(64), splits, 64, 14, 1024.0, planted)
    assert [x["skipped"] for x in lines] == skipped
    assert any(skipped) == bool(planted)
    assert state["loss_scale"]["scale"].item() == scale
    for key, value in raw.state_dict().items():
        assert torch.equal(value, state["model"][key]), f"{key} differs"
