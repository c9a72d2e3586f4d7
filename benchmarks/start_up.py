"""How long is it from a command to its first step, beyond `import torch`?

    python -m benchmarks.start_up [--runs N] [OVERRIDE ...]

Processes take turns: `python -c "import torch"`; a raw loop's start: the recipe's model, PyTorch's
optimizer and one step on random numbers; the command `mprun OVERRIDE ...`, which ends right after
its first step. Each is timed from outside, from its start to its end, files in the page cache. The
figures are medians, and the median difference to `import torch` of the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date

from mprun.train.machine.machine import cpu_name, usable_cores

IMPORT = "import torch, os; os._exit(0)"
RAW = """
import torch, os
from torch import nn
model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                      nn.Linear(256, 10))
optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
x, y = torch.rand(8192, 784), torch.randint(10, (8192,))
optimizer.zero_grad()
nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
os._exit(0)
"""
COMMAND = """
import os, sys
from mprun.cli import main

def first_step():
    from mprun.train import loop
    step = loop.Trainer.optimizer_step
    def ended(self, batch):
        step(self, batch)
        os._exit(0)
    loop.Trainer.optimizer_step = ended

import mprun.cli.train_command as command
run = command._run
def started(*arguments):
    first_step()
    return run(*arguments)
command._run = started
sys.exit(main.main(sys.argv[1:]))
"""


def seconds(code: str, *arguments: str) -> float:
    """From the start of a process to its end."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    return time.perf_counter() - began


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("overrides", nargs="*", default=["recipe=mnist"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases: dict[str, tuple[str, ...]] = {
            "import torch": (IMPORT,),
            "raw loop": (RAW,),
            "mprun": (COMMAND, *args.overrides),
        }
        rows: dict[str, list[float]] = {name: [] for name in cases}
        for n in range(args.runs + 1):
            for name, (code, *arguments) in cases.items():
                own = [f"run.dir={folder}/{n}"] if arguments else []
                took_s = seconds(code, *arguments, *own)
                if n:  # the first round reads the files
                    rows[name].append(took_s)
    print(f"{date.today()}  {cpu_name()}, {usable_cores()} cores; {args.runs} rounds")
    base = rows["import torch"]
    for name, times in rows.items():
        above = [t - b for t, b in zip(times, base, strict=True)]
        print(
            f"{name:14} {statistics.median(times):6.2f} s, beyond import torch "
            f"{statistics.median(above):6.2f} s ({min(above):.2f} to {max(above):.2f})"
        )


if __name__ == "__main__":
    main()
