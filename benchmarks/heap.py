"""What glibc's two variables still buy, and how far whole runs of one variant differ.

    python -m benchmarks.heap [--runs N] [--steps N] [--batch N] [--speeds auto plain]

Whole runs of `fashion_mnist` in processes of their own, taking turns: with `speed=auto`, which
keeps the heap, and with `speed=auto` and the variables that do the same. If the ratio of the median
step times is near 1, mprun's heap is steady. The runs without the variables also show how well runs
of one variant agree. `speed=plain`, which leaves the heap alone, shows what there is to gain.

A run's figure is its median step time. On a machine that is shared, other work lengthens most steps
of some runs; the 10th percentile of a run's steps, shown too, is nearer to an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

from benchmarks.alternate import interval
from mprun.records.run_record import Summary, read_summary
from mprun.train.machine.machine import cpu_name, usable_cores

STEADY = {"MALLOC_TRIM_THRESHOLD_": "4294967295", "MALLOC_MMAP_MAX_": "0"}
SUBJECTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "speed=auto": (["speed=auto"], {}),
    "speed=auto with the variables": (["speed=auto"], STEADY),
    "speed=plain": (["speed=plain"], {}),
    "speed=plain with the variables": (["speed=plain"], STEADY),
}


def run(args: list[str], variables: dict[str, str]) -> Summary:
    """The record of a whole run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mprun", *args, f"run.dir={folder}/run"]
        env = {key: value for key, value in os.environ.items() if key not in STEADY}
        subprocess.run(
            command, env={**env, **variables}, check=True, stdout=subprocess.DEVNULL, cwd=folder
        )
        return read_summary(Path(folder, "run"))


def _spread(ms: list[float]) -> str:
    """Median and range of the runs, and by how much the longest exceeds the shortest."""
    excess = max(ms) / min(ms) - 1
    return f"{statistics.median(ms):.2f} ms ({min(ms):.2f} to {max(ms):.2f}, {excess:.0%})"


def main() -> None:
    """Print a line per mode and subject."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="of each subject")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--speeds", nargs="+", choices=("auto", "plain"), default=("auto", "plain"))
    options = parser.parse_args()
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; fashion_mnist, batch {options.batch}, {options.runs} runs of "
        f"{options.steps} steps each, taking turns"
    )
    base = [
        *("recipe=fashion_mnist", "device=cpu", f"train.batch_size={options.batch}"),
        *(f"train.max_steps={options.steps}", "data.eval_limit=64", "data.fallback=generated"),
    ]
    speeds = [f"speed={name}" for name in options.speeds]
    subjects = {name: x for name, x in SUBJECTS.items() if x[0][0] in speeds}
    for precision in ("fp32", "bf16_mixed"):
        times: dict[str, list[float]] = {name: [] for name in subjects}
        quickest: dict[str, list[float]] = {name: [] for name in subjects}
        faults: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(options.runs):
            for name, (args, variables) in subjects.items():
                summary = run([*base, f"precision={precision}", *args], variables)
                times[name].append(summary.step_time_ms.median or 0.0)
                quickest[name].append(summary.step_time_ms.p10 or 0.0)
                faults[name].append(summary.page_faults_per_step or 0.0)
        for name in subjects:
            print(
                f"{precision:11} {name:31} {_spread(times[name])}; 10th percentiles "
                f"{_spread(quickest[name])}; "
                f"{statistics.median(faults[name]):,.0f} page faults per step"
            )
        for speed in speeds:
            plain, steady = times[speed], times[f"{speed} with the variables"]

            def ratio(index: list[int], a: list[float] = plain, b: list[float] = steady) -> float:
                return statistics.median(a[i] for i in index) / statistics.median(
                    b[i] for i in index
                )

            low, high = interval(ratio, options.runs)
            whole = ratio(list(range(options.runs)))
            print(
                f"{precision:11} {speed} over the same with the variables: "
                f"{whole:.3f} [{low:.3f}, {high:.3f}]"
            )


if __name__ == "__main__":
    main()
