"""Does no step of a shipped recipe beat its least time, and how much of it does each reach?

    python -m benchmarks.roofline [--steps N] [--budget-s S]

One line per recipe and mode: the least time, op by op and fused, the median step, the share that it
reaches, and each group of ops that was faster than its own least time by more than a tenth: there a
bound is wrong, or the machine was busy while its rates were measured. Exits with 1 if there is one.
Generated data, which have no influence on the time of a step.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date

import torch

from mprun.doctor.machine import cpu_name, usable_cores
from mprun.inspect.machine_examination import examine
from mprun.inspect.step_roofline import plan_step, recipe_roofline
from mprun.results.roofline_result import Roofline

CASES = (
    "linear",
    "mnist",
    "fashion_mnist",
    "fashion_mnist train.batch_size=256",
    "resnet",
    "char_gpt",
    "transformer",
)
PRECISIONS = ("fp32", "bf16_mixed")
TOLERANCE = 1.1
"""Rates and steps are measured one after the other, at loads that differ."""


def too_fast(roof: Roofline) -> list[str]:
    """What was faster than its least time."""
    found = [
        f"{g.name} {g.measured_ms:.3g} ms of at least {g.least_ms:.3g}"
        for g in roof.groups
        if g.measured_ms is not None and g.measured_ms * TOLERANCE < g.least_ms
    ]
    p10 = roof.step_time_ms.p10
    if p10 is not None and p10 * TOLERANCE < roof.least_ms:
        found.append(f"step {p10:.3g} ms of at least {roof.least_ms:.3g}")
    return found


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="timed of each case")
    parser.add_argument("--budget-s", type=float, default=10.0, help="for the machine's rates")
    args = parser.parse_args()
    examined = examine("cpu", args.budget_s)
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {examined.threads} threads, "
        f"torch {torch.__version__}; median of {args.steps} steps"
    )
    failed = False
    for case in CASES:
        for precision in PRECISIONS:
            overrides = [f"recipe={case.split()[0]}", *case.split()[1:], "device=cpu"]
            planned = plan_step([*overrides, f"precision={precision}"])
            roof = recipe_roofline(planned, examined, args.steps)
            problems = too_fast(roof)
            failed |= bool(problems)
            print(
                f"{case:35} {precision:11} least {roof.least_ms:8.3f} ms, fused "
                f"{roof.fused_ms:8.3f} ms, step {roof.step_time_ms.median:8.3f} ms, "
                f"share {roof.share:.0%}  {'; '.join(problems)}",
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
