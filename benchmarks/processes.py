"""Losses of several processes beside those of one process with the same global batch.

    python -m benchmarks.processes [--processes 2] [--steps 30] [--recipes mnist,transformer]

For each recipe, mode and `parallel=ddp|fsdp2`: the largest relative difference of the losses of
single steps, against one process that accumulates as many micro-batches as there are processes
(the same sums, in the same order), and against one process with one large batch (other kernels and
another order of additions, which 16-bit modes amplify). `speed=plain`; the last batch of an epoch
is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from mprun.train.machine.machine import cpu_name

MODES = ("fp32", "bf16_mixed", "fp16_mixed", "bf16_sr", "half_sr")
KINDS = ("ddp", "fsdp2")
SIZES = {"mnist": (64, ()), "transformer": (8, ("data.source=generated",))}
"""Recipe to the batch of a process, and further overrides."""


def losses(folder: Path, processes: int, overrides: Sequence[str]) -> list[float]:
    """The losses of the steps of a run in so many processes."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "mprun", *overrides, f"run.dir={folder}", "speed=plain"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [float(line["loss"]) for line in lines if line["kind"] == "step"]


def furthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(x - y) / abs(x) for x, y in zip(one, other, strict=True))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--recipes", default=",".join(SIZES))
    parser.add_argument("--modes", default=",".join(MODES))
    options = parser.parse_args()
    n, steps = options.processes, options.steps
    print(f"{date.today()}  {cpu_name()}, gloo, torch {torch.__version__}")
    print(f"{n} processes, {steps} steps")
    print("| recipe | mode | parallel | accumulating | one large batch |\n|---|---|---|---:|---:|")
    for recipe in options.recipes.split(","):
        batch, more = SIZES[recipe]
        whole = f"data.train_limit={batch * n * 10}"
        for mode in options.modes.split(","):
            base = [f"recipe={recipe}", f"precision={mode}", f"train.max_steps={steps}", whole]
            base += ["data.eval_limit=100", *more]
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                own = f"train.batch_size={batch}"
                parts = losses(root / "parts", 1, [*base, own, f"train.accumulate={n}"])
                large = losses(root / "large", 1, [*base, f"train.batch_size={batch * n}"])
                for kind in KINDS:
                    several = losses(root / kind, n, [*base, own, f"parallel={kind}"])
                    far = f"{furthest(parts, several):.1e} | {furthest(large, several):.1e}"
                    print(f"| `{recipe}` | `{mode}` | `{kind}` | {far} |", flush=True)


if __name__ == "__main__":
    main()
