"""AdamW over 16-bit parameters with stochastic rounding, against PyTorch's fused float32 AdamW.

    python -m benchmarks.optimizers [--size N] [--tensors N]

One step over one tensor, the two taking turns in one process (`alternate.py`); with torchao
installed, its AdamW with stochastic rounding (compiled, bfloat16 parameters) as well. With
`--tensors 150` the size is that of each of 150 tensors: small ones show the time of the host.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from datetime import date
from typing import NamedTuple

import torch

from benchmarks.alternate import BLOCKS, alternate
from mprun.optim import AdamW
from mprun.optim.engines import fastest
from mprun.precision.policy import dtype_name
from mprun.train.machine.conditions import steady_heap
from mprun.train.machine.machine import cpu_name, usable_cores


def times(step: Callable[[], object], device: torch.device) -> Iterator[float]:
    """Seconds of one step after another."""
    while True:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield time.perf_counter() - start


class Sizes(NamedTuple):
    """Of the parameters."""

    size: int
    tensors: int
    device: torch.device

    def made(self, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        """Parameters [size] with gradients, both standard normal."""
        made = []
        for _ in range(self.tensors):
            p = torch.nn.Parameter(torch.randn(self.size, device=self.device).to(dtype))
            p.grad = torch.randn(self.size, device=self.device).to(dtype)
            made.append(p)
        return made


def candidates(sizes: Sizes) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is compared with fused float32 AdamW: a name and one step."""
    for dtype in (torch.bfloat16, torch.float16):
        name = dtype_name(dtype)
        for moments in (torch.float32, dtype):
            made = AdamW(sizes.made(dtype), momentum_dtype=moments, variance_dtype=moments)
            yield f"{name}, moments {dtype_name(moments)}, stochastic", made.step
        nearest = AdamW(sizes.made(dtype), rounding="nearest")
        yield f"{name}, moments float32, nearest", nearest.step
        kahan = AdamW(sizes.made(dtype), rounding="kahan")
        yield f"{name}, moments float32, kahan", kahan.step
    codes = AdamW(
        sizes.made(torch.bfloat16),
        momentum_dtype=torch.uint8,
        variance_dtype=torch.uint8,
    )
    yield "bfloat16, moments uint8, stochastic", codes.step
    split = AdamW(sizes.made(torch.bfloat16), rounding="split")
    yield "bfloat16, moments float32, masters of 24 bits", split.step
    if sizes.device.type == "cpu":
        eager = AdamW(sizes.made(torch.bfloat16), engine="eager")
        yield "bfloat16, moments float32, stochastic, no kernels", eager.step
    try:
        from torchao.optim import AdamW8bit, _AdamW
    except ImportError:
        return
    theirs = _AdamW(sizes.made(torch.bfloat16), bf16_stochastic_round=True)
    yield "torchao: bfloat16, moments bfloat16, stochastic", theirs.step
    theirs = AdamW8bit(sizes.made(torch.bfloat16), bf16_stochastic_round=True)
    yield "torchao: bfloat16, moments uint8, stochastic", theirs.step


def main() -> None:
    """Print a line per candidate and, last, one JSON line."""
    steady_heap()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=10_000_000)
    parser.add_argument("--tensors", type=int, default=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes(**vars(parser.parse_args()), device=device)
    torch.manual_seed(0)
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, engine {fastest(device, 'adamw')}; {sizes.tensors} x "
        f"{sizes.size} parameters, "
        f"{BLOCKS} alternating steps"
    )
    rows = {}
    for name, step in candidates(sizes):
        fused = torch.optim.AdamW(sizes.made(torch.float32), fused=True)
        comparison = alternate(times(fused.step, device), times(step, device))
        rows[name] = comparison._asdict()
        print(f"{name:52} {comparison}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
