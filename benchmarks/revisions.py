"""Two checkouts of mprun in turns: is a step of the shipped recipes slower than it was?

    python -m benchmarks.revisions OLD NEW [--cases NAME ...] [--precisions MODE ...]

OLD and NEW are folders of two checkouts, after `make test` in each. Each trains in a process of its
own, from its own folder, with the loop of its `raw_loop.py`; the processes take turns, block by
block, and sleep while the other works. The time is that of the whole loop over the steps of a
block: data, step and bookkeeping. glibc keeps its memory in both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Generator
from datetime import date
from pathlib import Path

import torch

from benchmarks.alternate import HEAPS, alternate
from benchmarks.raw_loop import CASES
from mprun.train.machine.machine import cpu_name, usable_cores

CHILD = """
import sys
import torch
# all by raw_loop, which knows where its own checkout has them
from benchmarks.raw_loop import CASES, backend_flags, compose, make_plan, mprun_blocks

case, precision, speed = sys.argv[1:]
args = [*CASES[case].overrides, f"precision={precision}", f"speed={speed}", "device=cpu"]
plan = make_plan(compose(args).config, ())
with backend_flags(plan.policy):
    blocks = mprun_blocks(plan, CASES[case].steps)
    for _ in sys.stdin:
        print(next(blocks), flush=True)
"""


def blocks(folder: str, case: str, precision: str, speed: str) -> Generator[float]:
    """Seconds per step of a checkout, block after block."""
    environment = {**os.environ, **HEAPS["steady"]}
    own = Path(folder).resolve() / ".venv/bin/python"  # each has its own configuration files
    with subprocess.Popen(
        [own, "-c", CHILD, case, precision, speed],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        while True:
            child.stdin.write("go\n")
            child.stdin.flush()
            yield float(child.stdout.readline())


def main() -> None:
    """Print a line per recipe and mode."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16_mixed", "half_sr"])
    parser.add_argument("--speed", choices=("plain", "auto"), default="plain")
    args = parser.parse_args()
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; {args.blocks} alternating blocks, speed={args.speed}; "
        "old ms, new ms, new over old with its 95 % interval",
        flush=True,
    )
    for case in args.cases:
        for precision in args.precisions:
            if precision == "half_sr" and case.endswith("256"):
                continue
            old = blocks(args.old, case, precision, args.speed)
            new = blocks(args.new, case, precision, args.speed)
            print(f"{case:17} {precision:11} {alternate(old, new, args.blocks)}", flush=True)
            old.close()
            new.close()


if __name__ == "__main__":
    main()
