"""The cost of rounding errors, beside the spread of gradients and losses over batches.

    python -m benchmarks.sampling_noise

The tolerance of `mprun numerics` and `mprun search-ops` is based on it
(mprun/inspect/tolerance.py). A layer computes differences of numbers with an offset: the
larger the offset, the larger the rounding errors. The model is trained for 200 steps with PyTorch's
autocast, and in float32. During the float32 training, the errors of 16-bit passes are measured:
those of gradients over their variance between batches, in dB, and those of the loss over its
standard deviation.
"""

from __future__ import annotations

import math
from datetime import date
from statistics import fmean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.train.machine.machine import cpu_name

STEPS, BATCH, SAMPLES = 200, 64, 512
MEASURED_AT = (0, 20, 80, 160)
CENTRES = torch.randn(4, 16, generator=torch.Generator().manual_seed(17))


class Offset(nn.Module):
    """Vectors [B, 16] on an offset through a layer and off it again; classes [B, 4]."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.map, self.last = nn.Linear(16, 32, bias=False), nn.Linear(32, 4)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        offset = torch.full_like(x, self.offset)
        h = 16 * (self.map(offset + x / 16) - self.map(offset))
        out: Tensor = self.last(h.tanh())
        return out


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Vectors [n, 16] around four centres, and their classes."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=draw)
    return CENTRES[y] + torch.randn(n, 16, generator=draw), y


def loss_of(model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """With autocast, or in float32."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = model(x)
    return F.cross_entropy(out.float(), y)


def step_errors(model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype) -> str:
    """The errors of a dtype on the training batches, relative to the spread over batches."""
    parameters = list(model.parameters())
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    passes = {
        d: [(loss := loss_of(model, a, b, d), torch.autograd.grad(loss, parameters))
            for a, b in batches]
        for d in (torch.float32, dtype)
    }  # fmt: skip
    exact, low = passes[torch.float32], passes[dtype]
    ratios = []
    for k in range(len(parameters)):
        gradients = torch.stack([g[k] for _, g in exact])
        error = torch.stack([g[k] for _, g in low]) - gradients
        variance = (gradients - gradients.mean(0)).square().sum() / (len(batches) - 1)
        ratios.append(float(error.square().sum() / len(batches) / variance))
    losses = [loss.item() for loss, _ in exact]
    change = fmean(abs(a.item() - b) for (a, _), b in zip(low, losses, strict=True))
    return f"{10 * math.log10(max(ratios)):5.1f} dB {change / stdev(losses):5.2f}"


def accuracy(offset: float, dtype: torch.dtype, seed: int, other: torch.dtype) -> tuple[float, str]:
    """The accuracy on unseen samples after training, and the errors of another dtype during it."""
    torch.manual_seed(seed)
    model, seen = Offset(offset), []
    x, y = points(SAMPLES, 1000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    order = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        if other != dtype and step in MEASURED_AT:
            seen.append(step_errors(model, x, y, other))
        rows = torch.randperm(SAMPLES, generator=order)[:BATCH]
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x[rows], y[rows], dtype)).backward()
        scaler.step(optimizer)
        scaler.update()
    x, y = points(4 * SAMPLES, 2000 + seed)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        right = float(model(x).argmax(1).eq(y).float().mean())
    return right, "   ".join(seen)


def main() -> None:
    """Print a line per dtype, offset and seed."""
    print(f"{date.today()}  {cpu_name()}, torch {torch.__version__}")
    print(f"errors over the variance and the deviation of batches, before steps {MEASURED_AT}")
    for dtype, offsets in ((torch.bfloat16, (4, 8, 16, 32, 64)), (torch.float16, (64, 128, 256))):
        for offset in offsets:
            for seed in (0, 1):
                exact, errors = accuracy(offset, torch.float32, seed, dtype)
                low, _ = accuracy(offset, dtype, seed, dtype)
                lost = 100 * (exact - low)
                print(f"{str(dtype)[6:]:9} {offset:4} {seed} {lost:5.1f} points lost   {errors}")


if __name__ == "__main__":
    main()
