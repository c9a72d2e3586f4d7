"""Batches and outputs of any structure, in every mode, against a raw loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.config.compose import compose
from mprun.precision import backend_flags
from mprun.recipe import Recipe
from mprun.train.assemble import Plan, make_plan
from mprun.train.assemble.parts import build_parts
from mprun.train.data import DataRequest, Splits, TensorSet
from mprun.train.loop import Limits, Trainer

pytestmark = pytest.mark.usefixtures("native_is_fast")

MODES = {
    "fp32": torch.float32,
    "bf16_mixed": torch.float32,
    "fp16_mixed": torch.float32,
    "bf16_sr": torch.bfloat16,
    "half_sr": torch.float16,
}
"""Mode to the dtype of its inputs."""


@dataclass
class Output:
    scores: Tensor
    note: str


class Net(nn.Module):
    """Token ids, a mask and a float feature in; a dictionary, a dataclass or a tuple out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(6, 3)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, ids: Tensor, mask: Tensor, feature: Tensor, labels: Tensor) -> Any:
        self.seen = {"ids": ids.dtype, "mask": mask.dtype, "feature": feature.dtype}
        pooled = (self.embed(ids) * mask.unsqueeze(-1)).mean(1)
        scores = self.head(torch.cat([pooled, feature.to(pooled.dtype)], 1))
        if self.kind == "dict":
            return OrderedDict(out=scores, name="scores")
        if self.kind == "dataclass":
            return Output(scores, "scores")
        return (scores, "scores", None)


@dataclass(frozen=True)
class Tokens(Recipe):
    kind: str = "dict"

    METRIC: ClassVar[tuple[str, str]] = ("loss", "min")

    def model(self) -> nn.Module:
        return Net(self.kind)

    def data(self, request: DataRequest) -> Splits:
        drawn = torch.Generator().manual_seed(1)
        part = TensorSet(
            {
                "ids": torch.randint(11, (24, 5), generator=drawn),
                "mask": torch.rand(24, 5, generator=drawn) > 0.3,
                "feature": torch.randn(24, 2, generator=drawn),
                "labels": torch.randint(3, (24,), generator=drawn),
            }
        )
        return Splits("tokens", "generated", part, part.first(8), part.first(0))

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        scores = output["out"] if self.kind == "dict" else getattr(output, "scores", None)
        scores = output[0] if scores is None else scores
        assert scores.dtype == torch.float32
        assert batch["feature"].dtype == torch.float32  # as the data gave it, in every mode
        return F.cross_entropy(scores, batch["labels"])


def planned(recipe: Recipe, *words: str) -> Plan:
    """A plan of `linear` with another recipe in it."""
    args = ["recipe=linear", "device=cpu", "train.batch_size=8", "train.epochs=1", *words]
    plan = make_plan(compose(args).config, ())
    return replace(plan, recipe=recipe, splits=recipe.data(DataRequest()))


@pytest.mark.representative("*-dict", "fp32-*", "half_sr-dataclass")
@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_keeps_what_is_no_float(mode: str, kind: str) -> None:
    plan = planned(Tokens(kind), f"precision={mode}")
    with backend_flags(plan.policy, plan.native_tf32):
        parts = build_parts(plan)
        trainer = Trainer(parts, Limits(1, None, None))
        trainer.fit()
    scores = trainer.train_scores()
    assert scores.loss is not None
    assert scores.loss > 0
    assert parts.model.seen == {"ids": torch.int64, "mask": torch.bool, "feature": MODES[mode]}


def raw(micro: int, steps: int) -> nn.Module:
    """A raw loop of the same training, batches of 8 in micro-batches."""
    recipe = Tokens()
    torch.manual_seed(0)
    model = recipe.model()
    data = recipe.data(DataRequest()).train.content
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    for rows in order.split(8)[:steps]:
        optimizer.zero_grad()
        for part in rows.split(micro):
            batch = {k: v[part] for k, v in data.items()}
            loss = recipe.loss(model(**batch), batch)
            (loss if micro == 8 else loss * (micro / 8)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("micro", [8, 4])
def test_weights_equal_those_of_a_raw_loop(micro: int) -> None:
    words = [f"train.batch_size={micro}", f"train.accumulate={8 // micro}", "train.lr=0.1"]
    plan = planned(Tokens(), "speed=plain", *words)
    with backend_flags(plan.policy, plan.native_tf32):
        parts = build_parts(plan)
        Trainer(parts, Limits(None, 3, None)).fit()
    pairs = zip(parts.model.parameters(), raw(micro, 3).parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
