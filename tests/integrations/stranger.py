"""A training script as anyone writes it, with a NaN planted at step 37, by kind of fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mprun

STEP = 37


class Gate(nn.Module):
    """A logarithm of what it gets: of 0 it is -inf."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.abs())


class Root(nn.Module):
    """A root: of 0 it is finite, and its gradient is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.abs())


class Halver(nn.Module):
    """A logarithm of what dropout leaves: only the random numbers decide whether it is of 0."""

    def forward(self, x: Tensor) -> Tensor:
        lucky = torch.nn.functional.dropout(torch.ones(1), 1 / 37, self.training)
        return x + torch.log(lucky)


class Squared(nn.Module):
    """Squares three times: 1e10 to the fourth is beyond float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).pow(2).pow(2).clamp(max=10)


KINDS = {"log": Gate, "root": Root, "dropout": Halver, "power": Squared}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.gain = nn.Parameter(torch.ones(8))
        self.part = KINDS[kind]()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(self.norm(self.first(x)) + self.part(x * self.gain * scale))


def batches(micro: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    for _ in range(60 * micro):
        yield (
            torch.randn(16, 8, generator=generator).abs() + 0.1,
            torch.randint(0, 3, (16,), generator=generator),
        )


def train(
    out: Path | None, kind: str = "log", micro: int = 1, bf16: bool = False, fault: bool = True
) -> tuple[list[Tensor], Any]:
    """Train 60 steps; weights, statistics and random state afterwards, and the observation."""
    torch.manual_seed(1)
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loop(run: Any) -> None:
        for n, (x, y) in enumerate(batches(micro), start=1):
            if fault and n == STEP * micro:
                x[3, 4] = 1e10 if kind == "power" else 0.0
            if run:
                run.note_batch((x, y))
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                output = model(x, scale=1.0)
            loss = nn.functional.cross_entropy(output.float(), y) / micro
            loss.backward()
            if n % micro == 0:
                optimizer.step()
                optimizer.zero_grad()

    if out is None:
        loop(None)
        return [*model.parameters(), *model.buffers(), torch.get_rng_state()], None
    with mprun.observe(model, optimizer, out, on_nonfinite="save") as run:
        loop(run)
    return [*model.parameters(), *model.buffers(), torch.get_rng_state()], run
