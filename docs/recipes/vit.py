"""A small vision transformer on MNIST with pixels from 0 to 255, normalized by their power."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mprun import Recipe
from mprun.train.data import DataRequest, Splits, image_splits

WIDTH, SIDE = 64, 7
"""Numbers of a token; pixels of a patch's side: an image is 16 patches."""


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(), RmsNorm()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        output: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return output


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.patch_norm = nn.Linear(SIDE * SIDE, WIDTH), RmsNorm()
        self.places = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = RmsNorm(), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        tiles = F.unfold(x, SIDE, stride=SIDE).transpose(1, 2)  # [B, 16, 49]
        x = self.patch_norm(self.patches(tiles)) + self.places
        output: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return output


@dataclass(frozen=True)
class Vit(Recipe):
    def model(self) -> nn.Module:
        return VisionTransformer()

    def data(self, request: DataRequest) -> Splits:
        return image_splits("MNIST", request)

    def prepare(self, inputs: Tensor) -> Tensor:
        return inputs.float()

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])

    def correct(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return output.argmax(1).eq(batch[1]).sum()
