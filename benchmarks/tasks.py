"""What the processes of `make bench` train: the recipes of the tutorials, without mprun's loop.

A task is `RECIPE BATCH_SIZE PRECISION`. Its model, data, preparation of a batch and loss are those
of the shipped recipe, its optimizer the published one with PyTorch's defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.recipe import Recipe
from mprun.train.data import DataRequest, Splits, TensorSet
from recipes.fashion_mnist import FashionMnist
from recipes.linear import Linear
from recipes.mnist import Mnist

DATA = "MPRUN_BENCH_DATA"
"""Environment variable: the folder of `save_data`."""


def save_data(recipe: str, splits: Splits, folder: Path) -> None:
    """Keep decoded training samples, so that no process decodes or draws them again."""
    assert isinstance(splits.train, TensorSet)
    torch.save(splits.train.content, folder / f"{recipe}.pt")


def _stored(recipe: str) -> Splits:
    train = TensorSet(*torch.load(Path(os.environ[DATA], f"{recipe}.pt")))
    return Splits(recipe, "local", train, train.first(0), train.first(0))


@dataclass(frozen=True)
class StoredFashionMnist(FashionMnist):
    """The recipe, with the samples of `save_data`."""

    draws_data: ClassVar[bool] = False

    def data(self, request: DataRequest) -> Splits:
        return _stored("fashion_mnist")


@dataclass(frozen=True)
class StoredMnist(Mnist):
    """The recipe, with the samples of `save_data`."""

    draws_data: ClassVar[bool] = False

    def data(self, request: DataRequest) -> Splits:
        return _stored("mnist")


class Case(NamedTuple):
    """A tutorial's recipe."""

    recipe: Recipe
    target: str
    """Its import path, for mprun."""
    optimizer: Callable[[Any], Optimizer]
    """With the values of conf/recipe."""
    batch_sizes: tuple[int, ...]
    images: bool = False
    """Whether it has convolutions, so that the memory format matters."""


CASES = {
    "fashion_mnist": Case(
        StoredFashionMnist(image_size=128, log_softmax_dim=1),
        "benchmarks.tasks.StoredFashionMnist",
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
        (12, 256),
        images=True,
    ),
    "mnist": Case(
        StoredMnist(units=256),
        "benchmarks.tasks.StoredMnist",
        lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, alpha=0.9, eps=1e-7),
        (128, 8192),
    ),
    "linear": Case(
        Linear(in_features=1024, out_features=512, samples=64),
        "mprun.recipes.linear.Linear",
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        (64,),
    ),
}


class Task(NamedTuple):
    """What is trained, the same for all."""

    name: str
    """One of `CASES`."""
    batch_size: int
    precision: str
    """fp32 or bf16_mixed."""

    @classmethod
    def parse(cls, text: str) -> Task:
        """From `RECIPE BATCH_SIZE PRECISION`."""
        name, batch_size, precision = text.split()
        return cls(name, int(batch_size), precision)

    @property
    def case(self) -> Case:
        return CASES[self.name]

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16_mixed"

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)

    def samples(self) -> TensorSet:
        """The training set, not prepared."""
        data = self.case.recipe.data(DataRequest()).train
        assert isinstance(data, TensorSet)
        return data

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Prepared batches for ever: inputs [B, ...] float32, targets [B, ...]."""
        recipe, data = self.case.recipe, self.samples()
        while len(data) == self.batch_size:
            yield recipe.prepare(data.inputs), data.targets
        while True:
            for index in torch.randperm(len(data)).split(self.batch_size):
                if len(index) == self.batch_size:
                    yield recipe.prepare(data.inputs[index]), data.targets[index]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The recipe's, computed in float32."""
        loss: Tensor = self.case.recipe.loss(output.float(), (output, targets))
        return loss

    def built(self) -> tuple[nn.Module, Optimizer]:
        """The model and its optimizer, PyTorch's defaults."""
        model = self.case.recipe.model()
        return model, self.case.optimizer(model.parameters())
