"""What is kept of a stream of changes, by simulation: levels of a stream beside a habit.

    python -m benchmarks.change_stream

A stream is 100 changes, one tried after the other against what was kept so far. Runs are normal,
and the spread is the standard deviation of the differences of pairs. `mprun` keeps a change if it
is shown to be better, one-sided, at the level of `next_level` (`compare.stream`). The habit makes
two runs of each and keeps a change whose mean is better by two standard deviations of the runs.
With a fresh baseline all comparisons are independent; else those until the next kept change share
the baseline's runs. 2,000 streams per row: the standard error of a share of 5 % is 0.5 points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from mprun.study.compare.decision import next_level

STREAMS, CHANGES = 2000, 100
EVERY = 10  # Of the changes, one that is real
RUN_SD = math.sqrt(0.5)  # Of a run, in spreads of a difference of two

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rule = Callable[[Floats, Floats, Flags], Flags]
"""Runs of the baseline and of the change (streams, seeds), and what was kept before (streams,
changes), to whether each stream keeps the change."""

level_after = cache(next_level)


def by_level(base: Floats, change: Floats, kept: Flags) -> Flags:
    """As `compare.stream` decides."""
    differences = change - base
    n = differences.shape[1]
    t = differences.mean(1) / (differences.std(1, ddof=1) / math.sqrt(n))
    levels = [level_after(tuple(row)) for row in kept.tolist()]
    found: Flags = stdtr(n - 1, -t) <= np.array(levels)
    return found


def by_habit(base: Floats, change: Floats, kept: Flags) -> Flags:
    """Better by two standard deviations of the runs, those of both sides."""
    sd = np.sqrt((base.var(1, ddof=1) + change.var(1, ddof=1)) / 2)
    found: Flags = change.mean(1) - base.mean(1) > 2 * sd
    return found


def streams(rule: Rule, seeds: int, gain: float, fresh: bool, count: int = STREAMS) -> Flags:
    """Whether each change was kept, (streams, changes); each tenth is better by `gain` spreads."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, RUN_SD, (count, seeds))
    kept = np.zeros((count, CHANGES), bool)
    for i in range(CHANGES):
        change = rng.normal(0, RUN_SD, base.shape)  # relative to what the baseline truly is
        now = rule(base, change + (gain if (i + 1) % EVERY == 0 else 0.0), kept[:, :i])
        kept[:, i] = now
        base = np.where(now[:, None], change, base)
        if fresh:
            base = rng.normal(0, RUN_SD, base.shape)
    return kept


def row(name: str, kept: Flags, gain: float) -> None:
    """Print the shares: streams that keep a change without effect, such changes, gains kept."""
    real = (np.arange(CHANGES) + 1) % EVERY == 0 if gain else np.zeros(CHANGES, bool)
    wrong = kept[:, ~real].sum(1)
    among = (wrong / np.maximum(1, kept.sum(1))).mean()
    gains = f"{kept[:, real].mean():.1%}" if gain else "-"
    print(f"{name:60}{(wrong > 0).mean():8.1%}{wrong.mean():8.2f}{among:8.1%}{gains:>8}")


def main() -> None:
    """Print a row per case."""
    print("streams that keep a change without effect; such changes kept per stream; their share")
    print("among those kept; real gains that are kept")
    for gain in (0.0, 1.0, 2.0):
        what = f"each 10th gains {gain:g} spreads" if gain else "changes without effect"
        for fresh in (True, False):
            of = "fresh" if fresh else "shared"
            for seeds in (3, 5, 10):
                kept = streams(by_level, seeds, gain, fresh)
                row(f"{what}, {of} baseline, {seeds} pairs", kept, gain)
            row(f"{what}, {of} baseline, habit", streams(by_habit, 2, gain, fresh), gain)


if __name__ == "__main__":
    main()
