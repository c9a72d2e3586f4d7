"""FashionMNIST at 128x128 with a small CNN: the model of Graphcore's half-precision tutorial.

conv 1-5 (3x3), ReLU, max-pool 2, conv 5-12 (5x5), ReLU, GroupNorm of 3 groups, fc 41772-100, ReLU,
fc 100-10, log-softmax, negative log-likelihood; AdamW at 1e-3, batches of 12 (32 in evaluation),
ten epochs over all 60,000 training images (as published: nothing is held out for validation;
`data.validation_fraction=0.1` does so).

The tutorial takes the log-softmax over dimension 0, the *batch*: each output then depends on the
other samples of its batch, in evaluation too. The default here is the class dimension;
`recipe.model.log_softmax_dim=0` restores the published choice. The log-softmax itself is computed
in float32 in every mode (Keras' rule for a last softmax).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.recipe import Classification
from mprun.train.data import DataRequest, Splits, TensorSet, image_sample, image_splits


class FashionCnn(nn.Module):
    """The tutorial's CNN on [B, 1, S, S] images in -1..1; log-probabilities [B, 10]."""

    def __init__(self, image_size: int, log_softmax_dim: int) -> None:
        super().__init__()
        self.log_softmax_dim = log_softmax_dim
        side = (image_size - 2) // 2 - 4  # 3x3 convolution, pooling by 2, 5x5 convolution
        self.conv1 = nn.Conv2d(1, 5, 3)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(5, 12, 5)
        self.norm = nn.GroupNorm(3, 12)
        self.fc1 = nn.Linear(12 * side * side, 100)
        self.fc2 = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.pool(self.conv1(x)))  # as the ReLU before it, on a quarter of the numbers
        # flatten copies to this format; norms of few channels are faster in it
        x = self.norm(F.relu(self.conv2(x).contiguous()))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=self.log_softmax_dim, dtype=torch.float32)


@dataclass(frozen=True)
class FashionMnist(Classification):
    """The Graphcore tutorial's FashionMNIST classifier."""

    image_size: int
    """Side the 28x28 images are resized to, in pixels."""
    log_softmax_dim: int
    """Dimension of the log-softmax: 1, the classes; 0, the batch, as published."""

    draws_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.image_size < 12:
            raise ValueError(f"image_size={self.image_size}: legal is 12 or more")
        if self.log_softmax_dim not in (0, 1):
            raise ValueError(f"log_softmax_dim={self.log_softmax_dim}: legal is 1 or 0")

    def model(self) -> nn.Module:
        return FashionCnn(self.image_size, self.log_softmax_dim)

    def data(self, request: DataRequest) -> Splits:
        return image_splits("FashionMNIST", request)

    def sample(self) -> TensorSet:
        return image_sample()

    def prepare(self, inputs: Tensor) -> Tensor:
        """[B, 1, 28, 28] of bytes to [B, 1, S, S], scaled as (x / 255 - 0.5) / 0.5.

        The resized image is rounded to bytes before it is scaled, as in the tutorial, whose images
        are resized as pictures and become tensors afterwards.
        """
        size = (self.image_size, self.image_size)
        resized = F.interpolate(inputs.float(), size=size, mode="bilinear", align_corners=False)
        return resized.round_().div_(127.5).sub_(1)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.nll_loss(output, batch[1])
