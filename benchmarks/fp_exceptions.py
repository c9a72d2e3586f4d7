"""What looking for floating-point exceptions costs a training step, and that off costs nothing.

    python -m benchmarks.fp_exceptions [--blocks N]

mprun's step on one batch (`Trainer.optimizer_step`) with `debug.fp_exceptions=off`, `log` and
`skip` against the step of a loop built without it, two at a time and turn by turn (`alternate.py`).
The ratio of `off` must be 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator

from benchmarks.alternate import alternate
from benchmarks.steps import heading, step_blocks
from mprun.config import compose
from mprun.train.assemble import build_parts, make_plan
from mprun.train.assemble.parts import build_exceptions, build_precision
from mprun.train.loop import Trainer
from mprun.train.machine.conditions import steady_heap

CASES = (
    ("linear", "fp32", 64, 20),
    ("mnist", "bf16_mixed", 128, 20),
    ("mnist", "bf16_sr", 128, 20),
    ("fashion_mnist", "bf16_mixed", 64, 3),
    ("fashion_mnist", "half_sr_full", 12, 3),
)
"""Recipe, mode, batch, steps a block."""

ACTIONS = ("off", "log", "skip")
BLOCKS = 80


def step_times(recipe: str, mode: str, batch: int, action: str, steps: int) -> Iterator[float]:
    """Seconds per step, block after block, after one that warms up; none: a loop without it."""
    args = [f"recipe={recipe}", f"train.batch_size={batch}", f"precision={mode}", "device=cpu"]
    args += ["speed=plain", "data.train_limit=1200", "data.source=generated"]
    args += [] if action == "none" else [f"debug.fp_exceptions={action}"]
    plan = make_plan(compose(args).config, ())
    if action == "none":
        parts = build_parts(plan)
    else:
        exceptions = build_exceptions(plan)
        parts = build_parts(plan, build_precision(plan, make=exceptions.precision))
        exceptions.attach(parts.model, parts.optimizer, lambda outcome: None)
    trainer = Trainer(parts, plan.limits)
    yield from step_blocks(plan, trainer, steps)


def main() -> None:
    """Print a line per case and, last, one JSON line."""
    steady_heap()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    blocks = parser.parse_args().blocks
    print(heading(blocks))
    rows = {}
    for (recipe, mode, batch, steps), action in itertools.product(CASES, ACTIONS):
        base, ours = (step_times(recipe, mode, batch, each, steps) for each in ("none", action))
        comparison = alternate(base, ours, blocks=blocks)
        name = f"{recipe} {mode} at {batch}, {action}"
        rows[name] = comparison._asdict()
        print(f"{name:40} {comparison}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
