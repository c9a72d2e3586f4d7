"""What the recipes with planted faults share: `recipe.model.fault=NAME` plants one.

A fault is a class that takes the place of a module's own (its weights stay as they were drawn), or
a function that changes the module. Run recipes of this folder from the root of the checkout:

    python -m mprun check recipe=benchmarks/check_models/lstm.py recipe.model.fault=stale_cast
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from mprun import Recipe
from mprun.train.data import DataRequest, Splits, TensorSet

NONE = "none"
SAMPLES = 128
"""Four batches of 32."""
Faults = dict[str, tuple[str, str, str]]
"""Name to: the module that is to be named, the mode in which it acts, what is wrong."""
Plants = Mapping[str, type[nn.Module] | Callable[[Any], object]]
"""Name to what plants it."""


@dataclass(frozen=True)
class FaultyRecipe(Recipe):
    """A recipe of a small model; a class of it has `FAULTS` and `PLANTS` and the fault's name."""

    fault: str = NONE

    FAULTS: ClassVar[Faults] = {}
    PLANTS: ClassVar[Plants] = {}
    METRIC: ClassVar[tuple[str, str]] = ("loss", "min")
    draws_data: ClassVar[bool] = False
    ignores: ClassVar[frozenset[str]] = frozenset({"data.source", "data.root", "data.fallback"})

    def __post_init__(self) -> None:
        if self.fault not in (NONE, *self.FAULTS):
            raise ValueError(f"fault={self.fault}: legal is none, {', '.join(self.FAULTS)}")

    @abstractmethod
    def healthy(self) -> nn.Module:
        """The model without a fault."""

    @abstractmethod
    def drawn(self, samples: int, generator: Generator) -> Any:
        """So many samples, nested as a batch."""

    def model(self) -> nn.Module:
        model = self.healthy()
        if self.fault != NONE:
            module = model.get_submodule(self.FAULTS[self.fault][0])
            plant = self.PLANTS[self.fault]
            if isinstance(plant, type):
                module.__class__ = plant
            else:
                plant(module)
        return model

    def data(self, request: DataRequest) -> Splits:
        train = TensorSet(self.drawn(SAMPLES, torch.Generator().manual_seed(0)))
        none = train.first(0)
        name = type(self).__name__
        return Splits(name, "generated", train.first(request.train_limit), none, none)

    def sample(self) -> TensorSet:
        return TensorSet(self.drawn(1, torch.Generator().manual_seed(0)))


def compute_dtype(x: Tensor) -> torch.dtype:
    """What autocast computes in, else the tensor's own dtype."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
