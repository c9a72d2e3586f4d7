"""A training step in each mode against fp32, on `fashion_mnist` at its batch of 12.

    python -m benchmarks.emulation [--steps N]

mprun's loop in both, `speed=auto`, taking turns block by block (`alternate.py`). Times of emulated
modes show what emulation costs here, not what a mode gains.
"""

from __future__ import annotations

import argparse
import json
from datetime import date

import torch

from benchmarks.alternate import alternate, keep_the_heap
from benchmarks.raw_loop import mprun_blocks
from mprun.assemble import Plan, make_plan
from mprun.config import compose
from mprun.doctor.environment import cpu_name, usable_cores
from mprun.precision import backend_flags

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
BLOCKS = 30


def planned(mode: list[str]) -> Plan:
    """The recipe in a mode, float16 with the published loss scale."""
    args = ["recipe=fashion_mnist", "device=cpu", "data.train_limit=1200", *mode]
    scale = [] if "bf16" in mode[0] or "fp32" in mode[0] else ["loss_scale=static"]
    return make_plan(compose([*args, *scale]).config, ())


def main() -> None:
    """Print a line per mode and, last, one JSON line."""
    keep_the_heap()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps per block")
    steps = parser.parse_args().steps
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; {BLOCKS} alternating blocks of {steps} steps"
    )
    rows = {}
    for mode in MODES:
        plan, fp32 = planned(mode), planned(["precision=fp32"])
        with backend_flags(plan.policy):
            blocks = (mprun_blocks(fp32, steps), mprun_blocks(plan, steps))
            comparison = alternate(*blocks, blocks=BLOCKS)
        name = " ".join(word.removeprefix("precision=") for word in mode)
        rows[name] = {"execution": plan.execution, **comparison._asdict()}
        print(f"{name:52} {plan.execution:8} {comparison}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
