"""Fine-tuning a tiny Llama with LoRA: what is trained, in which dtype, in how much memory."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from mprun.config.compose import compose
from mprun.optim import LowPrecisionOptimizer, MasterWeights
from mprun.recipe import Recipe
from mprun.train.assemble import build_parts, make_plan
from mprun.train.assemble.planned_memory import step_memory
from mprun.train.data import DataRequest, Splits, TensorSet
from mprun.train.loop import Limits, Trainer

NEEDED = ("peft", "transformers")
NOT_HERE = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(NOT_HERE), reason=f"not installed: {', '.join(NOT_HERE)}")

STORED = {
    "fp32": torch.float32,
    "bf16_mixed": torch.float32,
    "fp16_mixed": torch.float32,
    "bf16_sr": torch.bfloat16,
    "half_sr": torch.float16,
}


@dataclass(frozen=True)
class Lora(Recipe):
    """Next tokens with a Llama of one layer."""

    METRIC: ClassVar[tuple[str, str]] = ("loss", "min")

    def model(self) -> nn.Module:
        import peft  # 5 s: not while tests are collected
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
        return model

    def data(self, request: DataRequest) -> Splits:
        ids = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(0))
        train = TensorSet({"input_ids": ids, "labels": ids.clone()})
        return Splits("drawn", "generated", train, train.first(0), train.first(0), shuffle=False)


@dataclass(frozen=True)
class LoraWithAdagrad(Lora):
    """Makes its own optimizer."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.Adagrad(trained, lr=0.01)


def words(mode: str, kind: str, *more: str) -> list[str]:
    given = ["recipe=linear", f"recipe.target={__name__}.{kind}", f"precision={mode}"]
    given += ["device=cpu", "train.batch_size=4", "train.epochs=null", "train.max_steps=4"]
    return [*given, "train.optimizer.name=adamw", "train.lr=0.01", "speed=plain", *more]


def planned(mode: str, kind: str, *more: str) -> Any:
    composed = compose(words(mode, kind, *more))
    composed.config.recipe.model = {}
    return make_plan(composed.config, composed.given)


@pytest.mark.representative(
    "Lora-fp16_mixed", "Lora-half_sr", "LoraWithAdagrad-bf16_sr", "LoraWithAdagrad-fp32"
)
@pytest.mark.parametrize("mode", STORED)
@pytest.mark.parametrize("recipe", ["Lora", "LoraWithAdagrad"])
def test_only_adapters_train_and_the_base_has_the_modes_dtype(mode: str, recipe: str) -> None:
    scale = ["loss_scale.value=8"] if mode in ("fp16_mixed", "half_sr") else []
    plan = planned(mode, recipe, *scale)
    before = {n: p.detach().clone() for n, p in build_parts(plan).model.named_parameters()}
    parts = build_parts(plan)
    losses: list[float] = []
    trainer = Trainer(parts, Limits(None, 4, None))
    for batch in parts.train.epoch(None):
        losses.append(float(trainer.optimizer_step(batch).loss))
    assert all(map(math.isfinite, losses))
    after = dict(parts.model.named_parameters())
    assert {p.dtype for p in after.values()} == {STORED[mode]}
    changed = {n for n, p in after.items() if not torch.equal(p, before[n])}
    assert len(before) > len(changed) == 4
    assert all("lora_" in name for name in changed)
    held = {id(p) for group in parts.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for n, p in after.items() if "lora_" in n}
    assert {n for n, p in after.items() if p.grad is not None} == changed
    low = STORED[mode] != torch.float32
    kind = MasterWeights if recipe != "Lora" else LowPrecisionOptimizer
    assert isinstance(parts.optimizer, kind) == low


@pytest.mark.parametrize("mode", ["fp32", "bf16_sr"])
def test_frozen_parameters_have_neither_gradients_nor_state(mode: str) -> None:
    plan = planned(mode, "LoraWithAdagrad")
    model = build_parts(plan).model
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    every = sum(p.numel() for p in model.parameters())
    size = STORED[mode].itemsize
    assert step_memory(plan).totals["parameters"] == size * every
    at_end = step_memory(replace(plan)).timeline
    assert max(at_end["gradients"]) == size * adapters
    state = 4 * adapters + 4 * 4  # a sum of squares of each, and four step counts
    assert max(at_end["optimizer_state"]) == state + (4 * adapters if size == 2 else 0)
