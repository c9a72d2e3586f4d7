"""A small residual network with BatchNorm that classifies textures, with seven faults to plant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.check_models.faulty import Faults, FaultyRecipe, Plants, compute_dtype

DEFAULTS = {"train.batch_size": 32, "train.max_steps": 60, "train.lr": 3e-3}
CLASSES, SIDE, WIDTH = 4, 16, 24
BRIGHTNESS = 4.0
"""Mean of the images, which are not normalised."""

FAULTS: Faults = {
    "statistics_in_16_bits": (
        "blocks.0.norm1",
        "bf16_mixed",
        "Running mean and variance become bfloat16 with the first batch.",
    ),
    "variance_of_squares": (
        "stem.1",
        "bf16_mixed",
        "The variance is the mean of squares less the square of the mean, in bfloat16.",
    ),
    "kernel_drops_channels": (
        "blocks.1.conv1",
        "bf16_mixed",
        "The bfloat16 kernel reads whole vectors of 16 channels; of 24, the last 8 are left out.",
    ),
    "bias_twice": (
        "blocks.0.conv2",
        "fp16_mixed",
        "The float16 kernel adds the bias itself, and it is added again.",
    ),
    "pool_sums_in_16_bits": (
        "pool",
        "bf16_mixed",
        "The mean over positions is a sum in bfloat16, pixel by pixel.",
    ),
    "autocast_off": (
        "blocks.1",
        "bf16_mixed",
        "A block is computed in float32, from the time when it gave NaN in float16.",
    ),
    "clipped_before_unscaling": (
        "head",
        "fp16_mixed",
        "A hook clamps gradients to 1 while they are multiplied by the loss scale.",
    ),
}


class Block(nn.Module):
    """Two convolutions beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(WIDTH)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH, H, W] to the same."""
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(inner)))


class Pool(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C]."""
        return x.mean((2, 3))


class Network(nn.Module):
    """Images [B, 3, SIDE, SIDE] to logits [B, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.blocks = nn.Sequential(Block(), Block())
        self.pool = Pool()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        logits: Tensor = self.head(self.pool(self.blocks(self.stem(images))))
        return logits


class StatisticsIn16Bits(nn.BatchNorm2d):
    """Buffers that follow the dtype of the input."""

    def forward(self, input: Tensor) -> Tensor:
        for name in ("running_mean", "running_var"):
            setattr(self, name, self.get_buffer(name).to(input.dtype).float())
        result = super().forward(input)
        for name in ("running_mean", "running_var"):
            setattr(self, name, self.get_buffer(name).to(input.dtype))
        return result


class VarianceOfSquares(nn.BatchNorm2d):
    """One pass over the input, in its dtype."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.bfloat16:
            return super().forward(input)
        mean = input.mean((0, 2, 3), keepdim=True)
        square = input.square().mean((0, 2, 3), keepdim=True)
        variance = (square - mean.square()).clamp_min(0)
        normal = (input - mean) * torch.rsqrt(variance + self.eps)
        return normal * self.weight[:, None, None] + self.bias[:, None, None]


class KernelDropsChannels(nn.Conv2d):
    """A loop over whole vectors of channels."""

    def forward(self, input: Tensor) -> Tensor:
        if compute_dtype(input) != torch.bfloat16:
            return super().forward(input)
        whole = self.in_channels // 16 * 16
        return F.conv2d(input[:, :whole], self.weight[:, :whole], self.bias, padding=1)


class BiasTwice(nn.Conv2d):
    """A fused kernel that has learned to add the bias."""

    def forward(self, input: Tensor) -> Tensor:
        result = super().forward(input)
        if result.dtype == torch.float16 and self.bias is not None:
            result = result + self.bias.half()[:, None, None]
        return result


class PoolSumsIn16Bits(Pool):
    """A loop whose sum has the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        low, total = x.flatten(2), torch.zeros_like(x[:, :, 0, 0])
        if compute_dtype(x) == torch.bfloat16:
            low, total = low.bfloat16(), total.bfloat16()
        for pixel in low.unbind(-1):
            total = total + pixel
        return total / low.shape[-1]


class AutocastOff(Block):
    """A region that was forgotten."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def clipped_before_unscaling(module: nn.Linear) -> None:
    """Clamp gradients as they come."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))


PLANTS: Plants = {
    "statistics_in_16_bits": StatisticsIn16Bits,
    "variance_of_squares": VarianceOfSquares,
    "kernel_drops_channels": KernelDropsChannels,
    "bias_twice": BiasTwice,
    "pool_sums_in_16_bits": PoolSumsIn16Bits,
    "autocast_off": AutocastOff,
    "clipped_before_unscaling": clipped_before_unscaling,
}


@dataclass(frozen=True)
class CnnCheck(FaultyRecipe):
    """The direction of waves under noise."""

    fault: str = "none"
    """A name in FAULTS."""

    FAULTS: ClassVar[Faults] = FAULTS
    PLANTS: ClassVar[Plants] = PLANTS

    def healthy(self) -> nn.Module:
        return Network()

    def drawn(self, samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        kinds = torch.randint(CLASSES, (samples,), generator=generator)
        phase = 6.28 * torch.rand(samples, 3, 1, 1, generator=generator)
        angle = kinds * (torch.pi / CLASSES)
        down, along = angle.sin()[:, None, None, None], angle.cos()[:, None, None, None]
        rows = torch.arange(SIDE)[:, None]
        waves = torch.sin(1.5 * (down * rows + along * rows.T) + phase)
        noise = torch.randn(samples, 3, SIDE, SIDE, generator=generator)
        return BRIGHTNESS + waves + 0.5 * noise, kinds

    def loss(self, output: Tensor, batch: tuple[Any, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])
