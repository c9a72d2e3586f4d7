"""A small convolutional recipe whose samples cost nothing to make; fields as those of `linear`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mprun.recipe import Recipe
from mprun.train.data import DataRequest, Splits, TensorSet

WORDS = [
    *("recipe=linear", "recipe.name=convolutional", "device=cpu", "recipe.model.samples=8"),
    *(f"recipe.target={__name__}.Convolutional", "recipe.model.in_features=64"),
    *("recipe.model.out_features=4", "train.batch_size=8"),
]
"""Overrides that train it."""


@dataclass(frozen=True)
class Convolutional(Recipe):
    """One 3x3 convolution and a linear layer on images of random numbers."""

    in_features: int
    """Pixels, a square number."""
    out_features: int
    samples: int

    METRIC = ("loss", "min")

    def model(self) -> nn.Module:
        rest = (round(self.in_features**0.5) - 2) ** 2
        return nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * rest, self.out_features)
        )

    def data(self, request: DataRequest) -> Splits:
        generator, side = torch.Generator().manual_seed(0), round(self.in_features**0.5)
        inputs = torch.randn(self.samples, 1, side, side, generator=generator)
        targets = torch.randn(self.samples, self.out_features, generator=generator)
        part = TensorSet(inputs, targets)
        return Splits("random images", "generated", part, part.first(0), part.first(0))

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, batch[1])
