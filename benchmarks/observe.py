"""What `mprun.observe` adds to a step of a loop that it does not own.

    python -m benchmarks.observe [--blocks 40]

One loop with AdamW and a logged loss, with and without `observe` in turns, block by block. Model,
optimizer and batch are the same objects: of two equal models in one process, one can be 3 % slower
than the other by where its memory lies. The figure is the ratio of the medians of wall time per
step, lines of the record included, with a 95 % bootstrap interval over blocks. The models have many
parameters of middling size, which is what a read of each gradient costs most for, at about 20 ms a
step on one core of 2026.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mprun
from benchmarks.alternate import alternate
from mprun.train.machine.conditions import steady_heap
from mprun.train.machine.machine import cpu_name, usable_cores

STEPS = 50
"""Of a block."""
LOOKED_AT = 5
"""Steps before them, in which `observe` looks at more than in later ones."""


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Four layers, 48 parameters, 0.8 million numbers."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(4, 64, 128)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Eight convolutions with BatchNorm, 30 parameters, 0.26 million numbers."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(7):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(8, 3, 16, 16)


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "transformer": transformer,
    "convolutions": convolutions,
}


class Loop:
    """A loop of one model, as anyone writes it."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self._x = CASES[name]()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def steps(self, n: int, log: Callable[[torch.Tensor], None]) -> float:
        """Seconds per step of `n` steps."""
        began = time.perf_counter()
        for _ in range(n):
            self.optimizer.zero_grad()
            loss = self.model(self._x).square().mean()
            loss.backward()
            self.optimizer.step()
            log(loss)
        return (time.perf_counter() - began) / n

    def plain(self) -> Iterator[float]:
        """Seconds per step without observation, block after block."""
        while True:
            self.steps(LOOKED_AT, lambda loss: None)
            yield self.steps(STEPS, lambda loss: None)

    def observed(self, folder: Path, **options: Any) -> Iterator[float]:
        """Seconds per step under `observe`, a record for each block."""
        for number in itertools.count():
            with mprun.observe(self.model, self.optimizer, folder / str(number), **options) as run:
                self.steps(LOOKED_AT, lambda loss: run.log(loss=loss))
                seconds = self.steps(STEPS, lambda loss: run.log(loss=loss))
            yield seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=30)
    args = parser.parse_args()
    steady_heap()
    print(
        f"{cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for (number, name), action in itertools.product(enumerate(CASES), ("report", "save")):
            loop, records = Loop(name), Path(folder) / f"{number}{action}"
            observed = loop.observed(records, on_nonfinite=action)
            ratio = alternate(loop.plain(), observed, args.blocks)
            print(f"{name}, on_nonfinite={action}: {ratio}")


if __name__ == "__main__":
    main()
