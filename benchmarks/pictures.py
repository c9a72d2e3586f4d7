"""The pictures in docs/, made from runs.

    pip install mprun
    python -m benchmarks.pictures --out docs/pictures

`stochastic_rounding.png`: left, 10,000 bfloat16 parameters of 1 moved by 1e-4 a thousand times with
each rounding rule; right, the training loss of `recipe=linear` in five modes. With `--sweep FOLDER`
only the page of that sweep is photographed by Chromium: `report-light.png`, `report-dark.png`.
With `--terminal` only a sweep is run and its terminal recorded: `terminal.svg` (real MNIST needed).
With `--looks` only `looks.png` is drawn, from the simulation of `benchmarks/error_rates.py`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from torch import Tensor

from benchmarks.error_rates import LIMIT, normal, simulated
from docs.examples import TERMINAL
from mprun.cli.main import main as mprun
from mprun.optim import SGD
from mprun.precision.rounding import merge
from mprun.study.compare.looks import Look, planned_looks
from mprun.study.compare.statistics import ALPHA

SWEEP = "mprun sweep recipe=mnist precision=fp32,bf16_mixed,half_sr seeds=3"
PARAMETERS, STEPS, UPDATE = 10_000, 1000, 1e-4
COLOURS = {"float32": "#000000", "nearest": "#d55e00", "stochastic": "#0072b2", "kahan": "#009e73"}
LOSSES = {
    "fp32": ("#000000", "-"),
    "bf16_true": ("#d55e00", "-"),
    "bf16_sr": ("#0072b2", "--"),
    "fp16_true": ("#e69f00", "-"),
    "half_sr": ("#56b4e9", "--"),
}


def walk(rounding: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [STEPS + 1] of the parameters, remainders included."""
    p = torch.nn.Parameter(torch.ones(PARAMETERS, dtype=torch.bfloat16))
    p.grad_dtype = torch.float32
    p.grad = torch.full((PARAMETERS,), -UPDATE)
    optimizer = SGD([p], lr=1.0, rounding=rounding)
    means, spreads = [1.0], [0.0]
    for _ in range(STEPS):
        optimizer.step()
        state = optimizer.state[p]
        now = merge(p.detach(), state["remainder"]) if "remainder" in state else p.detach().float()
        means.append(now.double().mean().item())
        spreads.append(now.double().std().item())
    return torch.tensor(means), torch.tensor(spreads)


def losses(precision: str, folder: Path) -> list[float]:
    """The training loss of each step of `recipe=linear`."""
    args = ["recipe=linear", f"precision={precision}", f"run.dir='{folder / precision}'"]
    if mprun(args) != 0:
        raise SystemExit(f"{precision} failed")
    lines = (folder / precision / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return [line["loss"] for line in steps if line["kind"] == "step"]


def draw_walks(axes: Any) -> None:
    """The left picture."""
    axes.plot([0, STEPS], [1, 1 + STEPS * UPDATE], color=COLOURS["float32"], lw=3, alpha=0.3)
    for rounding in ("nearest", "stochastic", "kahan"):
        mean, spread = walk(rounding)
        steps = torch.arange(STEPS + 1)
        points = {"ls": "", "marker": "o", "markevery": 100} if rounding == "kahan" else {}
        axes.plot(steps, mean, color=COLOURS[rounding], label=rounding, **points)
        if rounding == "stochastic":
            low, high = mean - spread, mean + spread
            axes.fill_between(steps, low, high, color=COLOURS[rounding], alpha=0.15, lw=0)
    axes.set_title("10,000 bfloat16 parameters of 1, 1e-4 added each step")
    axes.set_xlabel("step")
    axes.set_ylabel("mean; band: one standard deviation")
    axes.legend(title="rounding", frameon=False)


def draw_losses(axes: Any) -> None:
    """The right picture."""
    with tempfile.TemporaryDirectory() as folder:
        for precision, (colour, style) in LOSSES.items():
            curve = losses(precision, Path(folder))
            axes.plot(range(1, len(curve) + 1), curve, color=colour, ls=style, label=precision)
    axes.set_title("recipe=linear, SGD at 1e-3, seed 0")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(title="precision", frameon=False)


def draw_memory(out: Path) -> None:
    """Take over the command's own picture."""
    with tempfile.TemporaryDirectory() as folder:
        args = ["recipe=fashion_mnist", "precision=fp32,half_sr", f"run.dir='{folder}'"]
        if mprun(["memory", *args, "device=cpu"]) != 0:
            raise SystemExit("mprun memory failed")
        shutil.copy(Path(folder) / "memory.png", out)


def photograph(page: Path, out: Path) -> None:
    """The top of a report's page, 1,280 pixels wide, in both schemes."""
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,1600"]
    for preferred, name in enumerate(("dark", "light")):
        scheme = f"--blink-settings=preferredColorScheme={preferred}"
        picture = f"--screenshot={(out / f'report-{name}.png').resolve()}"
        address = page.resolve().as_uri()
        subprocess.run(["chromium", *options, scheme, picture, address], check=True)


def record_terminal(out: Path) -> None:
    """What a terminal of 100 columns shows of `SWEEP`, as an SVG that loads no fonts."""
    environment = {**os.environ, **TERMINAL, "COLUMNS": "100"}
    command = [str(Path(sys.executable).with_name("mprun")), *SWEEP.split()[1:]]
    with tempfile.TemporaryDirectory() as folder:
        shown = subprocess.run(
            command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(f"$ {SWEEP}", style="bold green", highlight=False, markup=False)
    console.print(shown.stdout.rstrip(), highlight=False, markup=False)
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title="mprun", code_format=form.replace("Fira Code", "monospace"))
    (out / "terminal.svg").write_text("\n".join(map(str.rstrip, svg.splitlines())) + "\n")


def claims_by_look(looks: Sequence[Look], mean: float) -> list[float]:
    """The share of simulated studies of one mode with a false claim so far, after each look."""
    result = simulated(normal(1.0), 1, mean, looks, 0.0, stops=False)
    wrong = result.equivalent if mean else result.different
    return [float((wrong & (result.pairs <= look.pairs)).mean()) for look in looks]


def draw_looks(path: Path) -> None:
    """False claims after each look, at 5 % each and by the plan of `seeds=auto`."""
    plan = planned_looks(LIMIT)
    habit = [look._replace(level=ALPHA) for look in plan]
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
    titles = ("at the margin, called equivalent", "equal, called different")
    for axis, mean, title in zip(axes, (1.0, 0.0), titles, strict=True):
        pairs = [look.pairs for look in plan]
        for looks, name, style in ((habit, "5 % at each look", "o--"), (plan, "planned", "s-")):
            axis.plot(pairs, [100 * x for x in claims_by_look(looks, mean)], style, label=name)
        axis.axhline(5, color="grey", linewidth=0.8)
        axis.set(xlabel="seeds so far", title=title, xticks=pairs)
    axes[0].set_ylabel("studies with a false claim, %")
    axes[0].legend()
    figure.savefig(path / "looks.png", dpi=150)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", type=Path)
    parser.add_argument("--terminal", action="store_true")
    parser.add_argument("--looks", action="store_true")
    args = parser.parse_args()
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    if args.looks:
        draw_looks(out)
        return
    if args.terminal:
        record_terminal(args.out)
        return
    if args.sweep is not None:
        photograph(args.sweep / "report.html", out)
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    draw_walks(left)
    draw_losses(right)
    figure.savefig(out / "stochastic_rounding.png", dpi=110)
    draw_memory(out)


if __name__ == "__main__":
    main()
