"""MNIST with two hidden layers: the model of Keras' mixed-precision guide.

784 - units - units - 10 with ReLU, Glorot-uniform weights and zero biases; images divided by 255;
RMSprop at 1e-3 (rho 0.9, eps 1e-7), batches of 8192, five epochs, the last fifth of the training
set held out: 30 steps in all. The guide ends the model with a float32 softmax; here the softmax is
inside the cross entropy, computed in float32 from float32 outputs, which is the same function.

PyTorch's RMSprop adds eps outside the square root, Keras' inside: at 1e-7 the runs agree in
accuracy, not in bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mprun.recipe import Classification
from mprun.train.data import DataRequest, Splits, TensorSet, image_sample, image_splits


@dataclass(frozen=True)
class Mnist(Classification):
    """The Keras guide's MNIST classifier."""

    units: int
    """Units in each hidden layer: 256; the guide takes 64 where there is no accelerator."""

    draws_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.units < 1:
            raise ValueError(f"units={self.units}: legal is 1 or more")

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(784, self.units),
            nn.ReLU(),
            nn.Linear(self.units, self.units),
            nn.ReLU(),
            nn.Linear(self.units, 10),
        )
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
        return model

    def data(self, request: DataRequest) -> Splits:
        return image_splits("MNIST", request)

    def sample(self) -> TensorSet:
        return image_sample()

    def prepare(self, inputs: Tensor) -> Tensor:
        """[B, 1, 28, 28] of bytes to [B, 784] in 0..1."""
        return inputs.flatten(1).float().div_(255)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])
