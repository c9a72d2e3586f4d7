"""mprun's loop against a raw PyTorch loop: step time on each recipe, overhead on an empty model.

    python -m benchmarks.raw_loop [--scale X] [--heap both|"as it is"|steady]

Both loops run the same model, optimizer and batches in one process, taking turns block by block, so
that a machine whose speed drifts drifts for both. The figure is the ratio of mprun's median step
time to the raw loop's, with a 95 % bootstrap interval over blocks; a step's time here is the whole
loop's wall time divided by its steps, logging and metrics included. `speed=plain` on both sides.

Each heap (`benchmarks.alternate`) has a process of its own, which measures everything: the heap as
it is, which users have without asking, and one that keeps its memory, where no page fault hides the
loops' difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.alternate import BLOCKS, HEAPS, alternate, heap_environment
from mprun.assemble import Plan, build_parts, make_plan
from mprun.config import compose
from mprun.data import DataRequest, Splits, TensorSet
from mprun.doctor.environment import cpu_name, usable_cores
from mprun.precision import backend_flags
from mprun.recipe import Recipe
from mprun.train.loop import Limits, Trainer


@dataclass(frozen=True)
class Empty(Recipe):
    """A model of one number: what is left of a step is the loop."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def data(self, request: DataRequest) -> Splits:
        part = TensorSet(torch.zeros(64, 1), torch.zeros(64, 1))
        return Splits("empty", "generated", part, part.first(0), part.first(0), shuffle=False)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (output - batch[1]).mean()


class Case(NamedTuple):
    """What both loops train."""

    overrides: tuple[str, ...]
    steps: int
    """Steps of a block."""
    blocks: int = BLOCKS


CASES = {
    "linear": Case(("recipe=linear",), 40),
    "mnist": Case(("recipe=mnist",), 2),
    "fashion_mnist": Case(("recipe=fashion_mnist",), 8),
    "fashion_mnist 256": Case(("recipe=fashion_mnist", "train.batch_size=256"), 1, 40),
}


def raw_blocks(plan: Plan, steps: int) -> Iterator[float]:
    """Seconds per step of a raw loop, block after block."""
    parts, recipe = build_parts(plan), plan.recipe
    model, optimizer, data = parts.model, parts.optimizer, plan.splits.train
    assert isinstance(data, TensorSet)
    bf16 = plan.policy.casting == "autocast"
    size = plan.batch.effective
    order = torch.Generator().manual_seed(plan.config.seed)
    shuffle = plan.splits.shuffle

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            permutation = torch.randperm(len(data), generator=order)
            for index in permutation.split(size):
                if len(index) < size:
                    continue
                x = data.inputs[index] if shuffle else data.inputs
                y = data.targets[index] if shuffle else data.targets
                yield recipe.prepare(x), y

    source = batches()
    while True:
        start = time.perf_counter()
        for _ in range(steps):
            x, y = next(source)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                output = model(x)
            loss = recipe.loss(output.float(), (x, y))
            loss.backward()
            optimizer.step()
        yield (time.perf_counter() - start) / steps


def mprun_blocks(plan: Plan, steps: int) -> Iterator[float]:
    """Seconds per step of mprun's loop, block after block."""
    splits = plan.splits
    assert isinstance(splits.train, TensorSet)
    full = len(splits.train) // plan.batch.effective * plan.batch.effective
    whole = replace(splits, train=splits.train.first(full), validation=splits.validation.first(0))
    parts = build_parts(replace(plan, splits=whole))
    done = 0
    trainer = Trainer(parts, Limits(None, None, None))
    while True:
        done += steps
        trainer.limit(Limits(None, done, None))
        start = time.perf_counter()
        trainer.fit()
        yield (time.perf_counter() - start) / steps


def compare(plan: Plan, steps: int, blocks: int = BLOCKS) -> dict[str, float]:
    """Alternate blocks of both loops; ratio of medians with its interval."""
    comparison = alternate(raw_blocks(plan, steps), mprun_blocks(plan, steps), blocks)
    return {
        "raw_ms": comparison.base_ms,
        "mprun_ms": comparison.other_ms,
        "ratio": comparison.ratio,
        "low": comparison.low,
        "high": comparison.high,
    }


def measure(heap: str, scale: float) -> None:
    """Print a line per case and, last, one JSON line."""
    rows = {}
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; {BLOCKS} alternating blocks (batch 256: 40); heap {heap}"
    )
    for recipe, case in CASES.items():
        for precision in ("fp32", "bf16_mixed"):
            args = [*case.overrides, f"precision={precision}", "speed=plain", "device=cpu"]
            plan = make_plan(compose(args).config, ())
            with backend_flags(plan.policy):
                row = compare(plan, max(1, int(case.steps * scale)), case.blocks)
            rows[f"{recipe} {precision}"] = row
            print(
                f"{recipe:17} {precision:11} raw {row['raw_ms']:8.3f} ms  "
                f"mprun {row['mprun_ms']:8.3f} ms  "
                f"ratio {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
                flush=True,
            )
    linear = make_plan(compose(["recipe=linear", "speed=plain", "device=cpu"]).config, ())
    empty = Empty()
    plan = replace(linear, recipe=empty, splits=empty.data(DataRequest()))
    row = compare(plan, max(1, int(2000 * scale)))
    overhead_us = (row["mprun_ms"] - row["raw_ms"]) * 1e3
    rows["empty"] = {**row, "overhead_us": overhead_us}
    print(
        f"empty model: raw {row['raw_ms'] * 1e3:.1f} us, mprun {row['mprun_ms'] * 1e3:.1f} us, "
        f"host overhead {overhead_us:.1f} us per step"
    )
    print(json.dumps({"heap": heap, **rows}), flush=True)


def main() -> None:
    """Measure under each heap, in a process of its own, because glibc reads its settings once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps per block")
    parser.add_argument("--heap", choices=("both", *HEAPS), default="both")
    parser.add_argument("--here", action="store_true", help="in this process; glibc was told")
    args = parser.parse_args()
    if args.here:
        measure(args.heap, args.scale)
        return
    for heap in HEAPS if args.heap == "both" else (args.heap,):
        module = [sys.executable, "-m", "benchmarks.raw_loop", "--here"]
        options = ["--heap", heap, "--scale", str(args.scale)]
        subprocess.run([*module, *options], env=heap_environment(heap), check=True)


if __name__ == "__main__":
    main()
