"""How much worse everything in a 16-bit dtype is than weights of its precision alone.

    python -m benchmarks.op_noise

What `mprun search-ops` tolerates rests on it (`SLACK_DB` in mprun/inspect/tolerance.py).
Models of several kinds, drawn at random, on random batches; none of their ops is hostile. For each
the SQNR of the parameter that fares worst, both ways, and the ops that a search keeps in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from mprun.inspect.op_search import sensitivity
from mprun.precision import Float16Fallback
from mprun.train.machine.machine import cpu_name

Batches = list[tuple[Tensor, Tensor]]


class Encoder(nn.Module):
    """A transformer encoder over vectors [B, T, 64], averaged over T; classes [B, 10]."""

    def __init__(self, activation: Callable[[Tensor], Tensor], norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            *(64, 4, 256, 0.1, activation), batch_first=True, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(x).mean(1))


def deep_mlp() -> nn.Module:
    """Six hidden layers of 64 units."""
    hidden = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


def batches(*shape: int) -> Batches:
    """Two batches of normal inputs and random classes."""
    return [(torch.randn(*shape), torch.randint(0, 10, (shape[0],))) for _ in range(2)]


def cases() -> Iterator[tuple[str, nn.Module, Batches]]:
    """Name, model, batches."""
    yield "MLP, 6 x ReLU", deep_mlp(), batches(32, 64)
    yield "encoder, GELU, norm first", Encoder(F.gelu, True), batches(16, 16, 64)
    yield "encoder, ReLU", Encoder(F.relu, False), batches(16, 16, 64)
    yield "ResNet-18", models.resnet18(num_classes=10), batches(16, 3, 32, 32)
    yield "ResNet-18, 96 x 96", models.resnet18(num_classes=10), batches(8, 3, 96, 96)
    yield "VGG-11 with BatchNorm", models.vgg11_bn(num_classes=10), batches(8, 3, 32, 32)
    yield "MobileNet v3", models.mobilenet_v3_small(num_classes=10), batches(16, 3, 32, 32)


def main() -> None:
    """Print a line per model and dtype."""
    print(f"{date.today()}  {cpu_name()}, torch {torch.__version__}, seed 0")
    torch.manual_seed(0)
    for name, model, data in cases():
        for dtype in (torch.float16, torch.bfloat16):
            # Convolutions' float16 gradients have a reference kernel only: 20 times slower.
            fp32_fallback = Float16Fallback(matmuls=False) if dtype == torch.float16 else None
            result = sensitivity(model, F.cross_entropy, data, dtype, arithmetic=fp32_fallback)
            weights, lower = result.unavoidable.worst_db, result.lower.worst_db
            fp32 = ", ".join(result.smallest_ops().fp32) or "nothing"
            print(
                f"{name:26} {str(dtype)[6:]:9} weights alone {weights:5.1f} dB   everything "
                f"{lower:5.1f} dB   {weights - lower:5.1f} dB worse   kept in float32: {fp32}",
                flush=True,
            )


if __name__ == "__main__":
    main()
