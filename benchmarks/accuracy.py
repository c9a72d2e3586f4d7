"""Test accuracy of a recipe over seeds, mode beside mode, on real data.

    python -m benchmarks.accuracy --recipe mnist --seeds 10 --out FOLDER [override ...]

Runs `mprun` for every seed and mode in this process (same seed: same weights, same data order), and
prints each accuracy, the step times, the difference paired by seed with its 95 % t interval, and
last one JSON line. Records land in the folder given by --out. A mode may bring overrides of its
own: `--precision fp32,half_sr:loss_scale=static`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from datetime import date
from pathlib import Path

import torch
from scipy.stats import t as student

from mprun.cli.main import main as mprun
from mprun.records.run_record import Summary, read_summary
from mprun.train.machine.machine import cpu_name, usable_cores


def run(recipe: str, precision: str, seed: int, out: Path, overrides: list[str]) -> Summary:
    """One run; its summary."""
    mode, *own = precision.split(":")
    folder = out / f"{recipe}-{mode}-seed{seed}"
    args = [f"recipe={recipe}", f"precision={mode}", f"seed={seed}", "data.source=real", *own]
    if mprun([*args, f"run.dir='{folder}'", *overrides]) != 0:
        raise SystemExit(f"{folder} failed")
    return read_summary(folder)


def paired(a: list[float], b: list[float]) -> tuple[float, float]:
    """Mean of b - a and the half width of its 95 % interval (Student's t over the pairs)."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return mean, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, float(student.ppf(0.975, len(differences) - 1)) * error


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--seeds", type=int, required=True)
    parser.add_argument("--precision", default="fp32,bf16_mixed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    modes = options.precision.split(",")
    summaries: dict[str, list[Summary]] = {mode: [] for mode in modes}
    for seed in range(options.seeds):
        for mode in modes:
            summaries[mode].append(run(options.recipe, mode, seed, options.out, options.overrides))

    print(
        f"\n{date.today()}  {options.recipe} {' '.join(options.overrides)}  {cpu_name()}, "
        f"{usable_cores()} cores, torch {torch.__version__}, seeds 0 to {options.seeds - 1}"
    )
    accuracy = {m: [float(s.test.accuracy or 0) for s in summaries[m]] for m in modes}
    for mode in modes:
        mean = statistics.mean(accuracy[mode])
        times = [float(s.step_time_ms.median or math.nan) for s in summaries[mode]]
        print(
            f"{mode:11} accuracy {' '.join(f'{a:.4f}' for a in accuracy[mode])}  "
            f"mean {mean:.4f}; median step {statistics.median(times):.2f} ms "
            f"({min(times):.2f} to {max(times):.2f} over runs)"
        )
    for mode in modes[1:]:
        mean, half = paired(accuracy[modes[0]], accuracy[mode])
        print(f"{mode} - {modes[0]}: {mean:+.4f} +/- {half:.4f} (95 %, paired by seed)")
    print(json.dumps({"accuracy": accuracy}))


if __name__ == "__main__":
    main()
