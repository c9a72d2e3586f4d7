"""A small MLP on scikit-learn's digits: a recipe that trains in seconds.

1,797 images of 8x8 pixels as 64 features from 0 to 16, ten classes. They come with scikit-learn
(`pip install 'mprun[tabular]'`), so nothing is downloaded. A fixed fifth is the test set, with as
many of each class; AdamW at 3e-3, batches of 32, 20 epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.errors import UsageError
from mprun.recipe import Classification
from mprun.train.data import DataRequest, Splits, TensorSet
from mprun.train.data.sources import held_out

FEATURES, CLASSES, LARGEST = 64, 10, 16
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Tabular(Classification):
    """An MLP with ReLU on scikit-learn's digits."""

    units: int
    """Width of the hidden layers."""
    layers: int
    """Hidden layers."""

    draws_data: ClassVar[bool] = False
    ignores: ClassVar[frozenset[str]] = frozenset({"data.source", "data.root", "data.fallback"})

    def __post_init__(self) -> None:
        for name in ("units", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: legal is 1 or more")

    def model(self) -> nn.Module:
        widths = [FEATURES, *[self.units] * self.layers]
        hidden = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(self.units, CLASSES))

    def data(self, request: DataRequest) -> Splits:
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ImportError:
            raise UsageError(
                "recipe=tabular needs scikit-learn: pip install 'mprun[tabular]'"
            ) from None
        features, classes = load_digits(return_X_y=True)
        parts = train_test_split(
            features, classes, test_size=TEST_SHARE, random_state=0, stratify=classes
        )
        inputs, tested, targets, tested_classes = (torch.from_numpy(part) for part in parts)
        known = TensorSet(inputs.float(), targets.long())
        test = TensorSet(tested.float(), tested_classes.long())
        return held_out("scikit-learn digits", "local", known, test, request)

    def sample(self) -> TensorSet:
        return TensorSet(torch.empty(1, FEATURES), torch.empty(1, dtype=torch.int64))

    def prepare(self, inputs: Tensor) -> Tensor:
        """[B, 64] from 0 to 16 as numbers from 0 to 1."""
        return inputs / LARGEST

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])
