"""What travels to the training device, and in which dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.config import compose
from mprun.recipe import Recipe
from mprun.train.assemble import build_parts, make_plan
from mprun.train.data import DataRequest, Splits, TensorSet

AWAY = torch.device("meta")
"""A device that is not the host's memory; nothing can be computed there, but everything be sent."""
INPUTS = {
    **dict.fromkeys(("fp32", "bf16_mixed", "fp16_mixed"), torch.float32),
    **dict.fromkeys(("fp16_true", "half_sr", "half_sr_full"), torch.float16),
    **dict.fromkeys(("bf16_true", "bf16_sr"), torch.bfloat16),
}


@dataclass(frozen=True)
class Stored(Recipe):
    """Samples [8, 4] as they are stored."""

    dtype: str

    loss_reads_inputs: ClassVar[bool] = False

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def data(self, request: DataRequest) -> Splits:
        inputs = torch.arange(32).reshape(8, 4).to(getattr(torch, self.dtype))
        part = TensorSet(inputs, torch.zeros(8, 1))
        return Splits("counts", "generated", part, part, part)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])


@dataclass(frozen=True)
class Prepared(Stored):
    """The same, scaled; 1/3 is not a 16-bit number, so that the dtype of the product shows."""

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs.float() / 3


class Sent(TorchDispatchMode):
    """The dtypes of what is copied to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.device != args[0].device:
            self.dtypes.append(args[0].dtype)
        return made


def sent(kind: type[Stored], stored: str, mode: str) -> tuple[list[torch.dtype], Tensor]:
    """What a batch of each part sends, inputs before targets, and the inputs it makes."""
    words = ["recipe=linear", f"precision={mode}", "speed=plain", "device=cpu"]
    words += [f"recipe.target={__name__}.{kind.__name__}", "recipe.name=stored"]
    config = compose([*words, "train.batch_size=8", "train.eval_batch_size=8"]).config
    config.recipe.model = {"dtype": stored}
    chosen = replace(make_plan(config, ()), device=AWAY)
    parts, found = build_parts(chosen), []
    for batches in (parts.train, parts.validation, parts.test):
        with Sent() as seen:
            batch = next(batches.epoch(None))
        assert batch.parts[0].inputs[0].device == batch.parts[0].content[1].device == AWAY
        found.append(seen.dtypes)
    assert found == [found[0]] * 3
    return found[0], batch.parts[0].inputs[0]


@pytest.mark.representative("fp16_mixed-Stored", "half_sr-*", "bf16_true-Prepared", "fp32-Prepared")
@pytest.mark.parametrize("kind", [Stored, Prepared])
@pytest.mark.parametrize("mode", INPUTS)
def test_floating_inputs_are_sent_in_the_mode_s_dtype(mode: str, kind: type[Stored]) -> None:
    dtypes, inputs = sent(kind, "float32", mode)
    assert dtypes == [INPUTS[mode], torch.float32]
    assert inputs.dtype == INPUTS[mode]


@pytest.mark.parametrize("mode", ["fp32", "half_sr"])
def test_bytes_are_sent_as_bytes_and_prepared_there(mode: str) -> None:
    dtypes, inputs = sent(Prepared, "uint8", mode)
    assert dtypes == [torch.uint8, torch.float32]
    assert inputs.dtype == INPUTS[mode]


def test_samples_are_prepared_in_float32_and_rounded_once() -> None:
    words = ["recipe=linear", "precision=half_sr", "device=cpu", "train.batch_size=8"]
    words += [f"recipe.target={__name__}.Prepared", "recipe.name=stored"]
    config = compose(words).config
    config.recipe.model = {"dtype": "float32"}
    batch = next(build_parts(make_plan(config, ())).train.epoch(None))
    expected = (torch.arange(32).reshape(8, 4).float() / 3).half()
    assert torch.equal(batch.parts[0].inputs[0], expected)
