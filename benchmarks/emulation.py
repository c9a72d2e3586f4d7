"""A training step in 16-bit modes against fp32, as `execution=auto` chooses and emulated.

    python -m benchmarks.emulation [--mixed] [--blocks N] [--steps N]
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m benchmarks.emulation --mixed

The second command hides the 16-bit instructions of the CPU: emulated `bf16_mixed` and `fp16_mixed`
are to take at most 1.4 times fp32's step on `fashion_mnist` (batch 12) and `mnist` (batch 8,192),
and `bf16_mixed` is to choose emulation. (mprun's own loops in C still use what the CPU has, unless
CC says otherwise: `CC="gcc -mno-avx512f"`.) With all instructions, native is to be
chosen.

mprun's loop in both, `speed=auto`, taking turns block by block (`alternate.py`). Times of emulated
modes show what emulation costs here, not what a mode gains.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import date
from itertools import product

import torch

from benchmarks.alternate import alternate
from benchmarks.raw_loop import mprun_blocks
from mprun.config import compose
from mprun.precision import backend_flags
from mprun.train.assemble import Plan, make_plan
from mprun.train.machine.conditions import steady_heap
from mprun.train.machine.machine import cpu_name, usable_cores

MODES = (
    ["precision=bf16_mixed"],
    ["precision=bf16_true"],
    ["precision=bf16_sr"],
    ["precision=fp16_true"],
    ["precision=half_sr"],
    ["precision=half_sr", "execution=emulated"],
    ["precision=half_sr_full"],
    ["precision=half_sr_full", "precision.partials_dtype=float16"],
)
MIXED = (
    ["precision=bf16_mixed"],
    ["precision=bf16_mixed", "execution=emulated"],
    ["precision=fp16_mixed"],
    ["precision=fp16_mixed", "execution=emulated"],
)
SIZES = {"fashion_mnist": (1200, 8), "mnist": (16384, 2)}
"""Recipe to its training samples and steps per block."""
LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "CC")
BLOCKS = 30
TARGET = 1.4
"""The most that an emulated mixed mode is to take of fp32's step."""


def planned(recipe: str, mode: list[str]) -> Plan:
    """The recipe in a mode, float16 with the published loss scale."""
    samples = f"data.train_limit={SIZES[recipe][0]}"
    args = [f"recipe={recipe}", "device=cpu", samples, *mode]
    scale = [] if "bf16" in mode[0] or "fp32" in mode[0] else ["loss_scale=static"]
    return make_plan(compose([*args, *scale]).config, ())


def main() -> None:
    """Print a line per recipe and mode and, last, one JSON line."""
    steady_heap()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed", action="store_true", help="the mixed modes, on both recipes")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--steps", type=int, help="steps per block; default: by recipe")
    options = parser.parse_args()
    limits = [f"{k}={v}" for k, v in os.environ.items() if k in LIMITS]
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; {options.blocks} alternating blocks; "
        f"{', '.join(limits) or 'all instructions'}"
    )
    rows = {}
    recipes, modes = (SIZES, MIXED) if options.mixed else (["fashion_mnist"], MODES)
    for recipe, mode in product(recipes, modes):
        plan, fp32 = planned(recipe, mode), planned(recipe, ["precision=fp32"])
        steps = options.steps or SIZES[recipe][1]
        with backend_flags(plan.policy):
            blocks = (mprun_blocks(fp32, steps), mprun_blocks(plan, steps))
            comparison = alternate(*blocks, blocks=options.blocks)
        name = " ".join([recipe, *(word.removeprefix("precision=") for word in mode)])
        rows[name] = {"execution": plan.execution, **comparison._asdict()}
        judged = options.mixed and plan.execution == "emulated"
        word = ("met" if comparison.ratio <= TARGET else "missed") if judged else ""
        print(f"{name:60} {plan.execution:8} {comparison} {word}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
