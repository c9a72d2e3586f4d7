"""A recipe whose model has a fault in front of its last layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mprun.recipe import Classification
from mprun.train.data import DataRequest, Splits, TensorSet

WORDS = ("--config-dir=conf", "recipe=faulty", "device=cpu")


class Net(nn.Module):
    """Two layers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + torch.zeros(8) if self.fault == "float32_tensor" else (h - 100).sqrt()
        out: Tensor = self.last(h)
        return out


@dataclass(frozen=True)
class Faulty(Classification):
    """`fault`: float32_tensor, whatever the mode; or roots of negative numbers."""

    fault: str

    def model(self) -> nn.Module:
        return Net(self.fault)

    def data(self, request: DataRequest) -> Splits:
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        part = TensorSet(inputs, torch.arange(16) % 3)
        return Splits("points", "generated", part, part, part)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1])


def write_recipe() -> None:
    """Make `recipe=faulty` known in the current folder."""
    folder = Path("conf/recipe")
    folder.mkdir(parents=True)
    (folder / "faulty.yaml").write_text(
        "# @package _global_\n"
        "recipe: {name: faulty, target: tests.reference_features.faulty.Faulty, "
        "model: {fault: roots}}\n"
        "train: {max_steps: 4, batch_size: 8, eval_batch_size: 8, lr: 0.01, "
        "optimizer: {name: sgd}}\n",
        encoding="utf-8",
    )
