"""How long `mprun compare` takes for a table of many runs, in a fresh process.

    python -m benchmarks.compare [--runs 500] [--repeats 7]

One real run (mnist on the generated set, 5 epochs) is copied into a folder for each of 10 variants
and their seeds, then the table is printed by new processes, without the report and with it. The
first process of each kind is not counted: it compiles the modules.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from mprun.cli.main import main as mprun

VARIANTS = 10
TARGET_S = 2.0
RUN = ("recipe=mnist", "data.source=generated", "data.train_limit=8192", "train.batch_size=128")


def make(folder: Path, runs: int) -> None:
    """`runs` folders, copies of one run with other seeds, variants and accuracies."""
    first = folder / "first"
    if mprun([*RUN, "device=cpu", f"run.dir='{first}'"]) != 0:
        raise SystemExit("the run to copy failed")
    summary = json.loads((first / "summary.json").read_text(encoding="utf-8"))
    for i in range(runs):
        seed, variant = divmod(i, VARIANTS)
        path = folder / "sweep" / str(i)
        shutil.copytree(first, path, ignore=shutil.ignore_patterns("*.pt"))
        name = "fp32" if variant == 0 else f"mode{variant}"
        summary.update(seed=seed, variant=name, precision=name, variant_hash=f"{variant:012}")
        summary["test"]["accuracy"] = 0.9 + 1e-4 * (i * 7919 % 101)  # some spread
        (path / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")


def times_s(args: list[str], folder: Path, repeats: int) -> list[float]:
    """Wall times of new processes, sorted."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        command = [sys.executable, "-m", "mprun", *args]
        subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - began)
    return sorted(times[1:])


def main() -> None:
    """Make the folders, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    cases = {
        "mprun --version": ["--version"],
        "the table": ["compare", "sweep", "compare.report=false"],
        "the table and the report": ["compare", "sweep", "compare.dir=report"],
    }
    with TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, options.runs)
        where = f"Python {platform.python_version()}, {os.cpu_count()} cores"
        print(f"{date.today()}  {options.runs} runs of {VARIANTS} variants, {where}")
        for case, args in cases.items():
            times = times_s(args, folder, options.repeats)
            text = f"median {median(times):.2f} s, {times[0]:.2f} to {times[-1]:.2f}"
            missed = case == "the table" and median(times) > TARGET_S
            target = f" (target {TARGET_S} s: {'MISSED' if missed else 'met'})"
            print(f"{case:26} {text}, n={len(times)}{target if case == 'the table' else ''}")


if __name__ == "__main__":
    main()
