"""Does a run's last step cost what its first ones did? Time, memory and files over a long run.

    python -m benchmarks.soak [--steps N] [--log-every N] [--folder FOLDER]

One run of `recipe=linear` with a tiny layer, whose epochs are single steps: it has as many epochs
as steps, and nearly all of its time is the loop and the record. A row for each twentieth of it.
The defaults, ten million steps, take some twenty minutes and a gigabyte of disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from mprun.config import compose
from mprun.config.reference import quoted
from mprun.records.run_record import Status
from mprun.study.planned_run import plan_or_resume
from mprun.train.callbacks import Callback
from mprun.train.machine.machine import cpu_name, usable_cores
from mprun.train.run import run
from mprun.train.signals import StopSignals

ROWS = 20


class SoakRows(Callback):
    """Prints a row at each checkpoint, which is written before.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at_s, self._cpu_s, self._step = time.perf_counter(), time.process_time(), 0

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        steps = state["step"] - self._step
        if steps:
            wall_us = (time.perf_counter() - self._at_s) / steps * 1e6
            cpu_us = (time.process_time() - self._cpu_s) / steps * 1e6
            self._print(state["step"], f"{wall_us:9,.0f}  {cpu_us:9,.0f}")
        self._step = state["step"]
        self._at_s, self._cpu_s = time.perf_counter(), time.process_time()

    def on_end(self, status: Status) -> None:
        self._print(self._step, status.rjust(20))

    def _print(self, step: int, times: str) -> None:
        names = ("summary.json", "checkpoints/last.pt", "metrics.jsonl")
        sizes = [(self._folder / name).stat().st_size for name in names]
        figures = "  ".join(f"{size:13,}" for size in sizes)
        print(f"{step:10,}  {times}  {resident_mb():8.1f}  {figures}", flush=True)


def resident_mb() -> float:
    """Memory of this process in 10^6 bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(x for x in text.splitlines() if x.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024 / 1e6


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--log-every", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="of the run; default: a temporary one")
    options = parser.parse_args()
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; {options.steps:,} steps, as many epochs"
    )
    print(
        "      step  us a step     of CPU  resident   summary.json        last.pt  metrics.jsonl\n"
        "                                        MB          bytes          bytes          bytes"
    )
    with tempfile.TemporaryDirectory() as temporary, StopSignals() as stop:
        folder = options.folder or Path(temporary) / "run"
        composed = compose(
            [
                *("recipe=linear", "device=cpu", "execution=native", f"run.dir={quoted(folder)}"),
                *("recipe.model.in_features=4", "recipe.model.out_features=2"),
                *("recipe.model.samples=4", "train.batch_size=4", "train.epochs=null"),
                *(f"train.max_steps={options.steps}", f"train.log_every={options.log_every}"),
                f"train.checkpoint_every_steps={max(1, options.steps // ROWS)}",
            ],
            None,
        )
        plan, saved = plan_or_resume(composed)
        run(plan, composed.resolved, stop, [SoakRows(folder)], saved)


if __name__ == "__main__":
    main()
