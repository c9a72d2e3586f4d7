"""What the table of `speed=auto` rests on: memory format and optimizer kernels, side by side.

    python -m benchmarks.speed_choices [--rounds N]

For each recipe, mode and combination one model; their steps take turns in one process. Prints the
median step time with the 10th and 90th percentile, and last one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from datetime import date

import torch

from mprun.config import compose
from mprun.precision import backend_flags
from mprun.train.assemble import Plan, build_parts, make_plan
from mprun.train.clock import Clock
from mprun.train.loop import Limits, Trainer
from mprun.train.machine.machine import cpu_name, usable_cores
from mprun.train.machine.speed_choices import SpeedChoice

WARMUP = 4
IMPLEMENTATIONS = {
    "linear": ("forloop", "foreach", "fused"),
    "mnist": ("forloop", "foreach"),  # RMSprop has no fused kernel
    "fashion_mnist": ("forloop", "foreach", "fused"),
}


def stepper(plan: Plan) -> Callable[[], float]:
    """A function that takes one step of its own model and gives its milliseconds."""
    parts = build_parts(plan)
    trainer = Trainer(parts, Limits(1, None, None))
    clock = Clock()

    def step() -> float:
        batch = next(parts.train.epoch(None))
        clock.start()
        trainer.optimizer_step(batch)
        clock.stop()
        return clock.take()[0].ms

    return step


def main() -> None:
    """Print a line per combination."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; {rounds} rounds, {WARMUP} of them warm-up"
    )
    table = {}
    for recipe, implementations in IMPLEMENTATIONS.items():
        formats = ("contiguous", "channels_last") if recipe == "fashion_mnist" else ("contiguous",)
        for precision in ("fp32", "bf16_mixed"):
            args = [f"recipe={recipe}", f"precision={precision}", "device=cpu"]
            base = make_plan(compose(args).config, ())
            choices = [SpeedChoice(f, i) for f in formats for i in implementations]
            with backend_flags(base.policy):
                steppers = {c: stepper(replace(base, speed=c)) for c in choices}
                times: dict[SpeedChoice, list[float]] = {c: [] for c in choices}
                for _ in range(rounds):
                    for choice, step in steppers.items():
                        times[choice].append(step())
            for choice, ms in times.items():
                deciles = statistics.quantiles(ms[WARMUP:], n=10, method="inclusive")
                p10, median, p90 = deciles[0], deciles[4], deciles[8]
                name = f"{recipe} {precision} {choice.memory_format} {choice.optimizer_impl}"
                table[name] = {"p10": p10, "median": median, "p90": p90}
                print(f"{name:45} {median:8.2f} ms ({p10:.2f} to {p90:.2f})")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
