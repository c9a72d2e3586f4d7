"""What the spread of paired differences is made of, and which metric has least of it.

    python -m benchmarks.seed_noise run --recipe mnist --pairs 30 --out FOLDER
    python -m benchmarks.seed_noise table FOLDER

A verdict needs about as many pairs as the square of the spread of their differences in units of the
margin. `run` trains a recipe in fp32 and bf16_mixed with equal seeds and evaluates it at several
places of its last quarter; `table` compares, over the pairs, the spread of

    last        one evaluation, after the last step
    mean of k   the mean of the last k evaluations
    averaged    one evaluation of the mean of the weights at these places
    covariate   the last evaluation, less what the baseline's own deviation explains

for accuracy (margin half a point) and loss (margin 2 %), with the seeds for a power of 0.9 where
the modes are equal. `--orders N` trains each start with N orders of the samples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import ndtr, stdtrit
from torch import Tensor

from mprun.config import compose
from mprun.train.assemble import DataCache, Plan, build_parts, make_plan
from mprun.train.loop import Limits, StopRequestedError, Trainer

LATE = (0.75, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 1.0)
TENTH = 0.9  # Averages begin here
MODES = ("fp32", "bf16_mixed")
POWER = 0.9
MARGIN = {"accuracy": 0.005, "loss": 0.02}
# Shorter trainings where the recipe's own takes many minutes; `{text}` is a folder of Python files
RECIPES = {
    "mnist": [],
    "mnist_128": ["train.batch_size=128", "train.epochs=2"],
    "fashion_mnist": ["train.epochs=null", "train.max_steps=400", "data.eval_limit=2000"],
    "char_gpt": ["train.max_steps=1000", "recipe.model.text={text}", "data.eval_limit=400"],
    "resnet": ["train.epochs=null", "train.max_steps=250", "data.eval_limit=1000"],
}


class Trained(NamedTuple):
    """The evaluations of one training."""

    recipe: str
    mode: str
    seed: int
    order: int
    rows: list[tuple[float, float, float | None]]  # Share of the steps, loss, accuracy
    averaged: tuple[float, float | None]  # Of the mean of the weights over the last tenth


def train(recipe: str, mode: str, seed: int, order: int, text: str, load: DataCache) -> Trained:
    """Train a recipe once, with the samples in order number `order` of this start."""

    def planned(number: int) -> Plan:
        own = [x.format(text=text) for x in RECIPES[recipe]]
        name = recipe.removesuffix("_128")
        composed = compose([f"recipe={name}", f"precision={mode}", f"seed={number}", *own], None)
        return make_plan(composed.config, composed.given, load=load)

    plan = planned(seed)
    parts = build_parts(plan)
    if order:
        parts.order = build_parts(planned(1000 * order + seed)).order
    steps = plan.planned_steps
    assert steps is not None
    halt_at: list[float] = [0]
    trainer = Trainer(
        parts, Limits(None, steps, None), stop=lambda: bool(halt_at and trainer.step >= halt_at[0])
    )
    held_out = parts.validation if parts.test.is_empty else parts.test
    rows: list[tuple[float, float, float | None]] = []
    sums: dict[str, Tensor] = {}

    def evaluated() -> tuple[float, float | None]:
        halt_at[:] = []
        scores = trainer.evaluate(held_out)
        assert scores.loss is not None
        return float(scores.loss), scores.accuracy

    states = 0
    for share in sorted({max(1, round(x * steps)) for x in LATE}):
        halt_at[:] = [share]
        with contextlib.suppress(StopRequestedError):
            trainer.fit()
        rows.append((share / steps, *evaluated()))
        if share >= TENTH * steps:
            states += 1
            for key, value in parts.model.state_dict().items():
                if value.is_floating_point():
                    sums[key] = sums.get(key, 0) + value.detach().double()
    state = parts.model.state_dict()
    mean = {k: (sums[k] / states).to(v.dtype) if k in sums else v for k, v in state.items()}
    parts.model.load_state_dict(mean)
    return Trained(recipe, mode, seed, order, rows, evaluated())


def run(options: argparse.Namespace) -> None:
    """Train the pairs that the file does not have yet."""
    options.out.mkdir(parents=True, exist_ok=True)
    file, load = options.out / f"{options.recipe}.jsonl", DataCache()
    done = {(x.mode, x.seed, x.order) for x in read(file)} if file.exists() else set()
    text = options.text or str(library_text(options.out / "text.txt"))
    for seed in range(options.pairs):
        for order in range(options.orders):
            for mode in MODES:
                if (mode, seed, order) not in done:
                    row = train(options.recipe, mode, seed, order, text, load)
                    with file.open("a") as lines:
                        lines.write(json.dumps(row) + "\n")


def library_text(path: Path) -> Path:
    """A file of about a million characters of Python's own library, for want of another text."""
    if not path.exists():
        files = sorted(Path(json.__file__).parent.parent.glob("*.py"))
        text = "".join(x.read_text(errors="ignore") for x in files)
        known = "".join(x for x in text[:4_000_000] if x == "\n" or 32 <= ord(x) < 97)
        path.write_text(known[:1_100_000])
    return path


def read(file: Path) -> list[Trained]:
    """The trainings in a file."""
    return [Trained(*json.loads(line)) for line in file.read_text().splitlines()]


# ---- the table -----------------------------------------------------------------------------------


def seeds_for(spread: float) -> int:
    """Pairs that show two equal modes to be equivalent with a chance of 0.9 (normal, TOST)."""
    for n in range(3, 2000):
        limit = stdtrit(n - 1, 0.95)
        # chance that |mean| + limit * s / sqrt(n) <= 1, with the spread as if it were known
        room = (1 / spread * math.sqrt(n)) - limit
        if room > 0 and 2 * ndtr(room) - 1 >= POWER:
            return n
    return 2000


def metrics(x: Trained, column: int) -> dict[str, float]:
    """Each way to score a training; `column` 1 is the loss, 2 the accuracy (NaN without one)."""

    def known(value: float | None) -> float:
        return math.nan if value is None else value

    values = [known(row[column]) for row in x.rows]
    late = [known(row[column]) for row in x.rows if row[0] >= TENTH]
    found = {"last": values[-1], "averaged weights": known(x.averaged[column - 1])}
    found[f"mean over the last tenth ({len(late)})"] = fmean(late)
    found[f"mean over the last quarter ({len(values)})"] = fmean(values)
    return found


def table(options: argparse.Namespace) -> None:
    """Print the spreads."""
    for file in sorted(options.folder.glob("*.jsonl")):
        by_key: dict[tuple[int, int], dict[str, Trained]] = defaultdict(dict)
        for x in read(file):
            by_key[x.seed, x.order][x.mode] = x
        pairs = {k: v for k, v in by_key.items() if len(v) == len(MODES)}
        firsts = [v for (_, order), v in sorted(pairs.items()) if order == 0]
        if len(firsts) < 4:
            print(f"{file.stem:14} {len(firsts)} pairs: too few for a spread")
            continue
        for column, name in ((2, "accuracy"), (1, "loss")):
            if firsts[0]["fp32"].rows[-1][column] is None:
                continue
            rows = [[metrics(v[m], column) for m in MODES] for v in firsts]
            for metric in rows[0][0]:
                ours, theirs = ([row[i][metric] for row in rows] for i in (1, 0))
                show(file.stem, name, metric, ours, theirs)
            show_orders(file.stem, name, pairs, column)


def show(recipe: str, name: str, metric: str, ours: list[float], theirs: list[float]) -> None:
    """A row: the spread of the differences, and of what the baseline's deviation leaves."""
    scale = fmean(theirs) if name == "loss" else 1.0
    differences = [(a - b) / scale for a, b in zip(ours, theirs, strict=True)]
    spread = stdev(differences) / MARGIN[name]
    around = [b - fmean(theirs) for b in theirs]
    squares = sum(b * b for b in around)
    slope = sum(d * b for d, b in zip(differences, around, strict=True)) / squares
    left = [d - slope * b for d, b in zip(differences, around, strict=True)]
    covariate = math.sqrt(sum((x - fmean(left)) ** 2 for x in left) / (len(left) - 2))
    print(
        f"{recipe:14} {name:9} {metric:32} n={len(ours):3}  mean {fmean(differences):+.5f}  "
        f"spread {spread:5.2f} margins, {covariate / MARGIN[name]:5.2f} with covariate; "
        f"{seeds_for(spread):4} pairs"
    )


def show_orders(
    recipe: str, name: str, pairs: dict[tuple[int, int], dict[str, Trained]], column: int
) -> None:
    """The spread between starts, and between the orders of one start."""
    by_seed: dict[int, list[float]] = defaultdict(list)
    for (seed, _), v in pairs.items():
        ours, theirs = (metrics(v[mode], column)["last"] for mode in ("bf16_mixed", "fp32"))
        by_seed[seed].append(ours - theirs)
    groups = [x for x in by_seed.values() if len(x) > 1]
    if len(groups) < 2:
        return
    within = math.sqrt(fmean(stdev(x) ** 2 for x in groups))
    means = stdev([fmean(x) for x in groups])
    print(
        f"{recipe:14} {name:9} {len(groups)} starts x {len(groups[0])} orders: between orders "
        f"{within:.5f}, of the means of a start {means:.5f} "
        f"({within / math.sqrt(len(groups[0])):.5f} if the start had no part in it)"
    )


def main() -> None:
    """Run or print."""
    parser = argparse.ArgumentParser(description="the spread of paired differences")
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--recipe", choices=RECIPES, required=True)
    running.add_argument("--pairs", type=int, default=30)
    running.add_argument("--orders", type=int, default=1)
    running.add_argument("--text", help="a text file for char_gpt; by default of Python's library")
    running.add_argument("--out", type=Path, required=True)
    running.set_defaults(call=run)
    printing = commands.add_parser("table")
    printing.add_argument("folder", type=Path)
    printing.set_defaults(call=table)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
