"""mprun adds nothing: losses and weights are those of a raw PyTorch loop, bit for bit.

`speed=plain`, CPU, same thread count; the tolerance is zero because no operation differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from mprun.cli.main import main
from mprun.recipes.mnist import Mnist
from mprun.records.run_record import read_lines
from tests.parity import raw_loop
from tests.run.test_resume import trained

CASES = {
    case.__name__: case
    for case in (
        *(raw_loop.linear, raw_loop.mnist, raw_loop.fashion_mnist, raw_loop.resnet),
        *(raw_loop.char_gpt, raw_loop.transformer, raw_loop.tabular),
    )
}
SAMPLES = {"linear": [], "tabular": []}
"""What a recipe is told of its samples."""


@pytest.mark.representative(
    *("linear-fp32", "mnist-bf16_mixed", "resnet-bf16_mixed", "transformer-bf16_mixed"),
    *("char_gpt-*", "tabular-*"),
)
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_equal_a_raw_loop_bit_for_bit(name: str, precision: str) -> None:
    raw = CASES[name]()
    words = [f"recipe={name}", f"precision={precision}", "speed=plain", "device=cpu", "run.dir=run"]
    words += SAMPLES.get(name, ["data.source=generated"])
    assert main([*words, *raw.words]) == 0
    raw_loop.assert_same(raw, torch.bfloat16 if precision == "bf16_mixed" else None)


@dataclass(frozen=True)
class Planted(Mnist):
    """MNIST whose loss is a million times too large at some steps (its own calls, counted)."""

    steps: ClassVar[set[int]] = {3, 9, 10}
    calls: ClassVar[list[int]] = []

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
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
    words += ["recipe.model.units=64", "data.source=generated", "loss_scale=dynamic"]
    words += ["loss_scale.growth_interval=4", "loss_scale.value=1024"]
    # The footprint runs the step twice on fake tensors; those calls are not the run's.
    monkeypatch.setattr("mprun.train.run.footprint", lambda plan: ({}, None))
    raw = raw_loop.of_recipe(Planted(64), raw_loop.rmsprop, 64, 14, validation_fraction=0.2)
    assert main([*words, *raw.words, f"recipe.target={__name__}.Planted"]) == 0
    monkeypatch.setattr(Planted, "calls", [])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    scales = [1024.0]
    update = scaler.update
    monkeypatch.setattr(scaler, "update", lambda: (update(), scales.append(scaler.get_scale())))
    raw_loop.assert_same(raw, torch.float16, scaler)
    skipped = [after < before for before, after in pairwise(scales)]
    steps = [line for line in read_lines(Path("run")) if line["kind"] == "step"]
    assert [line["skipped"] for line in steps] == skipped
    assert any(skipped) == bool(planted)
    assert trained(Path("run"))["loss_scale"]["scale"].item() == scales[-1]
