"""What tests of commands share: a process to fork from, and a recipe of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.processes import Forking

OWN_RECIPE = """\
# @package _global_
# A line through points
recipe:
  name: points
  target: my_recipes.Points
  model:
    points: 8
train:
  epochs: 2
  batch_size: 4
  eval_batch_size: 4
  lr: 0.1
  optimizer:
    name: sgd
"""
OWN_CLASS = """
from dataclasses import dataclass

import torch

from mprun.data import Splits, TensorSet
from mprun.recipe import Recipe


@dataclass(frozen=True)
class Points(Recipe):
    points: int
    METRIC = ("loss", "min")
    ignores = frozenset({"data.validation_fraction", "data.source"})

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self, request):
        x = torch.linspace(-1, 1, self.points).unsqueeze(1)
        points = TensorSet(x, 2 * x + 1)
        return Splits("points", "generated", points, points.first(4), points)

    def loss(self, output, batch):
        return (output - batch[1]).square().mean()
"""


@pytest.fixture
def own_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's recipe: its YAML in a folder of configs, its class in the current folder."""
    Path("my configs/recipe").mkdir(parents=True)
    Path("my configs/recipe/points.yaml").write_text(OWN_RECIPE, encoding="utf-8")
    Path("my_recipes.py").write_text(OWN_CLASS, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "my_recipes", raising=False)


@pytest.fixture(scope="session")
def forking() -> Iterator[Forking]:
    """Processes that need not import PyTorch: each takes seconds for that."""
    processes = Forking()
    yield processes
    processes.close()
