"""What `mprun.observe` adds to a step of a loop that it does not own.

    python -m benchmarks.observe [--blocks 40]

The same loop with and without `observe`, in one process, taking turns block by block: a plain loop
with AdamW and a logged loss. The figure is the ratio of the medians of the loop's wall time per
step, lines of the record included, with a 95 % bootstrap interval over blocks. The models have many
parameters of middling size, which is what a read of each gradient costs most for, at about 20 ms a
step on two cores of 2026.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mprun
from benchmarks.alternate import BLOCKS, alternate
from mprun.doctor.environment import cpu_name, usable_cores
from mprun.doctor.heap import steady_heap

STEPS = 10
"""Of a block."""


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Six layers, 74 parameters, 1.2 million numbers."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 64, 128)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Twelve convolutions with BatchNorm, 48 parameters, 0.4 million numbers."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(11):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(8, 3, 16, 16)


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "transformer": transformer,
    "convolutions": convolutions,
}


def blocks(name: str, out: Path | None, **options: Any) -> Iterator[float]:
    """Seconds per step of the loop, block after block."""
    torch.manual_seed(0)
    model, x = CASES[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with ExitStack() as stack:
        run = None
        if out is not None:
            run = stack.enter_context(mprun.observe(model, optimizer, out, **options))
        while True:
            began = time.perf_counter()
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                if run is not None:
                    run.log(loss=loss)
            yield (time.perf_counter() - began) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    args = parser.parse_args()
    steady_heap()
    print(
        f"{cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for (number, name), action in itertools.product(enumerate(CASES), ("report", "save")):
            out = Path(folder) / f"{number}{action}"
            observed = blocks(name, out, on_nonfinite=action)
            ratio = alternate(blocks(name, None), observed, args.blocks)
            print(f"{name}, on_nonfinite={action}: {ratio}")


if __name__ == "__main__":
    main()
