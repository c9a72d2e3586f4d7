"""The layers that most models have, with inputs for each: `mprun doctor check` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(NamedTuple):
    """A layer and what it reads."""

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    """Floating ones are cast to the dtype of the check, and get gradients."""


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._function(*inputs)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer, without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[0]
        return result


class SelfAttention(nn.Module):
    """PyTorch's attention of a sequence with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return result


def _drawn(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape),)


def _heads() -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 4, 24, 16) for _ in range(3))


def _classes() -> tuple[Tensor, ...]:
    return torch.randn(32, 10), torch.randint(10, (32,))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


IMAGES, TOKENS = _drawn(4, 16, 14, 14), _drawn(4, 24, 32)
LAYERS = (
    Layer("Linear", lambda: nn.Linear(512, 64), _drawn(32, 512)),
    Layer("Conv1d", lambda: nn.Conv1d(16, 32, 5, padding=2), _drawn(4, 16, 40)),
    Layer("Conv2d", lambda: nn.Conv2d(16, 32, 3, padding=1), IMAGES),
    Layer("Conv2d, strides", lambda: nn.Conv2d(16, 32, 3, stride=2), IMAGES),
    Layer("Conv2d, depthwise", lambda: nn.Conv2d(16, 16, 3, groups=16), IMAGES),
    Layer("ConvTranspose2d", lambda: nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), IMAGES),
    Layer("BatchNorm2d", lambda: nn.BatchNorm2d(16), IMAGES),
    Layer("GroupNorm", lambda: nn.GroupNorm(4, 16), IMAGES),
    Layer("LayerNorm", lambda: nn.LayerNorm(32), TOKENS),
    Layer("RMSNorm", lambda: nn.RMSNorm(32), TOKENS),
    Layer("Embedding", lambda: nn.Embedding(50, 32), lambda: (torch.randint(50, (4, 24)),)),
    Layer("LSTM", lambda: Recurrent(nn.LSTM(32, 16, batch_first=True)), TOKENS),
    Layer("GRU", lambda: Recurrent(nn.GRU(32, 16, batch_first=True)), TOKENS),
    Layer("MultiheadAttention", SelfAttention, TOKENS),
    Layer("attention, causal", lambda: Function(_causal), _heads),
    Layer("GELU", nn.GELU, TOKENS),
    Layer("SiLU", nn.SiLU, TOKENS),
    Layer("softmax", lambda: nn.Softmax(-1), TOKENS),
    Layer("MaxPool2d", lambda: nn.MaxPool2d(2), IMAGES),
    Layer("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(1), IMAGES),
    Layer("interpolate", lambda: Function(_upsample), IMAGES),
    Layer("cross_entropy", lambda: Function(F.cross_entropy), _classes),
)
