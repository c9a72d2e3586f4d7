"""One linear layer on one batch of random numbers: Habana's first mixed-precision example.

64 samples of 1024 inputs and 512 targets, all standard normal, mean squared error, SGD at 1e-3,
500 steps on the same batch in the same order. There is nothing to learn but the batch itself, so
there is no validation, no test and no accuracy: the training loss is the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.recipe import Recipe
from mprun.train.data import DataRequest, Splits, TensorSet


@dataclass(frozen=True)
class Linear(Recipe):
    """Habana's linear example."""

    in_features: int
    """Width of the inputs, D_in."""
    out_features: int
    """Width of the targets, D_out."""
    samples: int
    """Samples in the one batch, N."""

    METRIC: ClassVar[tuple[str, str]] = ("loss", "min")
    loss_reads_inputs: ClassVar[bool] = False
    ignores: ClassVar[frozenset[str]] = frozenset(
        {"data.source", "data.root", "data.fallback", "data.validation_fraction"}
        | {"data.eval_limit", "data.test", "train.eval_batch_size"}
    )

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: legal is 1 or more")

    def model(self) -> nn.Module:
        return nn.Linear(self.in_features, self.out_features)

    def data(self, request: DataRequest) -> Splits:
        generator = torch.Generator().manual_seed(request.seed)
        inputs = torch.randn(self.samples, self.in_features, generator=generator)
        targets = torch.randn(self.samples, self.out_features, generator=generator)
        train = TensorSet(inputs, targets).first(request.train_limit)
        return Splits(
            "random regression", "generated", train, train.first(0), train.first(0), shuffle=False
        )

    def sample(self) -> TensorSet:
        return TensorSet(torch.empty(1, self.in_features), torch.empty(1, self.out_features))

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(output, batch[1])
