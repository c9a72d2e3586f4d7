"""A training step with op lists against torch.autocast: eager, and compiled.

    python -m benchmarks.op_lists [--only eager|compiled]

mprun's step on one batch (`Trainer.optimizer_step`), `speed=plain`, the two taking turns block by
block (`alternate.py`). `native` casts what autocast casts, so its ratio is the cost of deciding in
Python; `hmp` casts other ops.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator

import torch

from benchmarks.alternate import alternate
from benchmarks.steps import heading, step_blocks
from mprun.config import compose
from mprun.train.assemble import build_parts, make_plan
from mprun.train.loop import Trainer
from mprun.train.machine.conditions import steady_heap

CASES = (("mnist", 128, 20), ("fashion_mnist", 64, 3))
"""Recipe, batch, steps a block."""

LISTS = ("native", "hmp")
BLOCKS = 80


def step_times(recipe: str, batch: int, lists: str, compiled: bool, steps: int) -> Iterator[float]:
    """Seconds per step, block after block, after one that warms up."""
    args = [f"recipe={recipe}", f"train.batch_size={batch}", "precision=bf16_mixed", "device=cpu"]
    args += [f"op_lists={lists}", "speed=plain", "data.train_limit=1200"]
    plan = make_plan(compose(args).config, ())
    parts = build_parts(plan)
    if compiled:
        parts.model = torch.compile(parts.model)  # type: ignore[assignment]
    trainer = Trainer(parts, plan.limits)
    yield from step_blocks(plan, trainer, steps)


def main() -> None:
    """Print a line per case and, last, one JSON line."""
    steady_heap()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("eager", "compiled"))
    options = parser.parse_args()
    print(heading(BLOCKS))
    rows = {}
    for compiled in (False, True):
        how = "compiled" if compiled else "eager"
        if options.only not in (None, how):
            continue
        for (recipe, batch, steps), lists in itertools.product(CASES, LISTS):
            base, ours = (
                step_times(recipe, batch, each, compiled, steps) for each in ("none", lists)
            )
            comparison = alternate(base, ours, blocks=BLOCKS)
            name = f"{recipe} at {batch}, {how}, {lists}"
            rows[name] = comparison._asdict()
            print(f"{name:40} {comparison}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
