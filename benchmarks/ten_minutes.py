"""From nothing to a verdict on a model of one's own: how many minutes?

    python3 -m benchmarks.ten_minutes [--toy] [--out FOLDER]

Needs Python and make, nothing else: this file imports the standard library alone. In an empty
folder it copies the checkout, installs it with `make` (which downloads PyTorch), writes a recipe
with `mprun new-recipe`, trains it, trains two modes with five seeds and compares them. Prints the
minutes of each step, and ends with status 1 where a step fails, no verdict comes, or it takes more
than ten minutes.

`--toy` installs nothing: it takes the mprun of this Python, few steps and two seeds. `--out` keeps
what was written there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_MIN = 10
RECIPE = "my_model.py"
MODES = "fp32,bf16_mixed"


class StepFailedError(Exception):
    """A step failed: which one, its status and its last lines."""


def timed(command: Sequence[str | Path], folder: Path) -> str:
    """Run a step and print its minutes.

    Returns:
        What it printed.

    Raises:
        StepFailedError: it ended with another status than 0.
    """
    name = " ".join([Path(command[0]).name, *map(str, command[1:])])
    start = time.monotonic()
    ended = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    print(f"{(time.monotonic() - start) / 60:6.2f} min  {name}", flush=True)
    if ended.returncode != 0:
        last = "\n".join(ended.stdout.splitlines()[-20:])
        raise StepFailedError(f"{name} ended with status {ended.returncode}:\n{last}")
    return ended.stdout


def install(folder: Path) -> Path:
    """A copy of the checkout, installed; its command.

    Args:
        folder: an empty one.
    """
    copy = folder / "mprun"
    caches = ("outputs", "build", "dist", "*.egg-info", "_prebuilt.*", "__pycache__", ".*")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*caches))
    timed(["make", f"PYTHON={sys.executable}", ".venv/.installed"], copy)
    return copy / ".venv" / "bin" / "mprun"


def verdicts(folder: Path) -> dict[str, str]:
    """Of each variant but the baseline, by its label, from the files of `mprun compare`."""
    found = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    return {
        row["label"]: row["verdict"]["word"]
        for row in found["variants"]
        if row["label"] != found["baseline"]
    }


def journey(folder: Path, toy: bool) -> dict[str, str]:
    """Do all steps in a folder; the verdicts."""
    mprun = [sys.executable, "-m", "mprun"] if toy else [install(folder)]
    steps, seeds = (["train.max_steps=20"], ["seeds=2"]) if toy else ([], [])
    recipe = f"recipe={RECIPE}"
    timed([*mprun, "new-recipe", RECIPE], folder)
    timed([*mprun, recipe, "precision=bf16_mixed", "run.dir=first", *steps], folder)
    sweep = ["sweep", recipe, f"precision={MODES}", *seeds, "run.dir=study"]
    timed([*mprun, *sweep, *steps], folder)
    said = timed([*mprun, "compare", "study"], folder)
    print(f"\n{said.splitlines()[0]}")
    return verdicts(folder / "study")


def main() -> int:
    """Run the command; 0 if a verdict came within ten minutes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--toy", action="store_true", help="mprun as installed here, few steps")
    parser.add_argument("--out", type=Path, help="an empty folder to keep everything in")
    options = parser.parse_args()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        if any(options.out.iterdir()):
            parser.error(f"{options.out} is not empty: name a new folder")

    start = time.monotonic()
    here = tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out)
    with here as folder:
        try:
            found = journey(Path(folder).resolve(), options.toy)
        except StepFailedError as failed:
            print(failed, file=sys.stderr)
            return 1
    minutes = (time.monotonic() - start) / 60
    print(", ".join(f"{label}: {kind}" for label, kind in found.items()))
    size = "toy size, nothing installed" if options.toy else f"{os.cpu_count()} cores"
    print(f"{minutes:.1f} minutes, {size}, Python {platform.python_version()}, {date.today()}")
    if minutes > LIMIT_MIN:
        print(f"more than {LIMIT_MIN} minutes: something became slow", file=sys.stderr)
    return int(not found or minutes > LIMIT_MIN)


if __name__ == "__main__":
    sys.exit(main())
