"""How often verdicts are wrong, by simulation: with looks, and with a fixed number of seeds.

    python -m benchmarks.error_rates

Each row is 100,000 studies or more (standard error at 5 %: 0.07 points) of 1, 3 or 13 modes that
share a baseline. First `seeds=auto`, all its looks together, then fixed seeds, each with Holm's
method over the modes:

    at the margin   any of the modes, which all differ by exactly the margin, called equivalent
    equal           any of the modes, which all equal the baseline, called different
    power           the share of equal modes that is called equivalent, and the pairs that it took

Both errors should be 5 % at most. Differences are normal, of 3 degrees of freedom, of whole samples
(accuracies of 1,000), or normal with a collapse on one seed in ten, where `equivalent` is always
wrong: no test of a mean sees what no seed has shown. Last: the habit of looking after 4, 7, 10, 15
and 20 pairs at 5 % each. The tests are those of mprun/study/compare, over arrays.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from mprun.study.compare.looks import HOPELESS, Look, planned_looks
from mprun.study.compare.statistics import ALPHA

STUDIES, CHUNK = 100_000, 10_000
MODES = (1, 3, 13)
FIXED = (3, 5, 10, 20)
LIMIT = 20

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
# From a generator, the studies, the pairs, the modes and their mean to differences in margins
Draw = Callable[[np.random.Generator, tuple[int, int, int], float], Floats]


class Result(NamedTuple):
    """What became of each mode of each study."""

    equivalent: Bools
    different: Bools
    pairs: NDArray[np.int64]
    hopeless: Bools


def rejected(p: Floats, level: float, left: NDArray[np.int64]) -> Bools:
    """Holm's method in each row, where `left` hypotheses of the family are not rejected yet."""
    order = p.argsort(1)
    steps = np.maximum(left[:, None] - np.arange(p.shape[1]), 1)
    passed = np.logical_and.accumulate(np.take_along_axis(p, order, 1) <= level / steps, 1)
    result = np.zeros(p.shape, bool)
    np.put_along_axis(result, order, passed, 1)
    return result


def study(differences: Floats, looks: Sequence[Look], floor: float, stops: bool = True) -> Result:
    """Verdicts on differences [studies, pairs, modes], in margins, after the looks."""
    shape = differences.shape[0], differences.shape[2]
    equal, apart, hopeless = (np.zeros(shape, bool) for _ in range(3))
    pairs = np.full(shape, looks[-1].pairs)
    for look in looks:
        n = look.pairs
        part = differences[:, :n]
        mean, sd = part.mean(1), np.maximum(part.std(1, ddof=1), floor / math.sqrt(12))
        error = np.maximum(sd, 1e-300) / math.sqrt(n)
        still = ~(equal | apart | hopeless)
        families = []
        for shift, sides, gone in ((np.abs(mean) - 1, 1, equal), (-np.abs(mean), 2, apart)):
            p = np.where(still, sides * stdtr(n - 1, shift / error), 1.0)
            families.append(rejected(p, look.level, (~gone).sum(1)))
        equal |= families[0] & still
        apart |= families[1] & still & ~families[0]
        ended = still & (equal | apart)
        if stops and look is not looks[-1]:
            lost = still & ~ended & (chances(mean, sd, n, looks[-1]) < HOPELESS)
            hopeless |= lost
            ended |= lost
        pairs[ended] = n
    return Result(equal, apart, pairs, hopeless)


def chances(mean: Floats, sd: Floats, n: int, last: Look) -> Floats:
    """`looks.chance_to_settle` over arrays."""
    error = sd / math.sqrt(last.pairs)
    inside = 1 + stdtrit(last.pairs - 1, last.level) * error
    outside = -stdtrit(last.pairs - 1, last.level / 2) * error
    spread = np.maximum(sd * math.sqrt(1 / n - 1 / last.pairs), 1e-300)

    def below(x: Floats) -> Floats:
        result: Floats = stdtr(n - 1, (x - mean) / spread)
        return result

    near = np.minimum(inside, outside)
    within = np.where(inside > 0, np.maximum(0, below(near) - below(-near)), 0)
    result: Floats = below(-outside) + 1 - below(outside) + within
    return result


# ---- differences ---------------------------------------------------------------------------------


def normal(spread: float) -> Draw:
    """Half of the variance is the baseline's, which all modes share."""

    def draw(rng: np.random.Generator, shape: tuple[int, int, int], mean: float) -> Floats:
        base = rng.normal(0, spread * math.sqrt(0.5), (*shape[:2], 1))
        return mean + rng.normal(0, spread * math.sqrt(0.5), shape) - base

    return draw


def heavy(spread: float) -> Draw:
    """Of Student's distribution with 3 degrees of freedom, whose standard deviation is 1.73."""

    def draw(rng: np.random.Generator, shape: tuple[int, int, int], mean: float) -> Floats:
        result: Floats = mean + spread / math.sqrt(3) * rng.standard_t(3, shape)
        return result

    return draw


def whole(samples: int, rate: float, margin: float = 0.005) -> Draw:
    """Accuracies of so many samples; the margin is half a point."""

    def draw(rng: np.random.Generator, shape: tuple[int, int, int], mean: float) -> Floats:
        base = rng.binomial(samples, rate, (*shape[:2], 1))
        own = rng.binomial(samples, rate - mean * margin, shape)
        result: Floats = (own - base) / samples / margin
        return result

    return draw


def collapsing(spread: float) -> Draw:
    """One seed in ten of each mode loses 80 points; the true mean is far outside the margin."""

    def draw(rng: np.random.Generator, shape: tuple[int, int, int], mean: float) -> Floats:
        healthy = normal(spread)(rng, shape, mean)
        result: Floats = np.where(rng.random(shape) < 0.1, -160.0, healthy)
        return result

    return draw


DRAWS: dict[str, tuple[Draw, float]] = {  # With the resolution of the metric, in margins
    "normal, spread 0.1 margins": (normal(0.1), 0.0),
    "normal, spread 0.5": (normal(0.5), 0.0),
    "normal, spread 0.7": (normal(0.7), 0.0),
    "normal, spread 1": (normal(1.0), 0.0),
    "normal, spread 1.5": (normal(1.5), 0.0),
    "3 degrees of freedom, spread 1": (heavy(1.0), 0.0),
    "accuracy 98 % of 1,000": (whole(1000, 0.98), 0.2),
    "accuracy 90 % of 1,000": (whole(1000, 0.90), 0.2),
    "accuracy 99.5 % of 1,000": (whole(1000, 0.994), 0.2),
}


def simulated(
    draw: Draw, modes: int, mean: float, looks: Sequence[Look], floor: float, stops: bool = True
) -> Result:
    """`STUDIES` studies."""
    rng = np.random.default_rng(modes)
    parts = [
        study(draw(rng, (CHUNK, looks[-1].pairs, modes), mean), looks, floor, stops)
        for _ in range(STUDIES // CHUNK)
    ]
    return Result(*map(np.concatenate, zip(*parts, strict=True)))


def row(name: str, draw: Draw, floor: float, modes: int, looks: Sequence[Look], stops: bool) -> str:
    """Errors and power of one plan."""
    at_margin = simulated(draw, modes, 1.0, looks, floor, stops)
    equal = simulated(draw, modes, 0.0, looks, floor, stops)
    return (
        f"{name:34}{modes:3} modes  at the margin {at_margin.equivalent.any(1).mean():6.2%}  "
        f"equal {equal.different.any(1).mean():6.2%}  power {equal.equivalent.mean():6.1%}  "
        f"pairs {equal.pairs.mean():5.1f}  at the margin {at_margin.pairs.mean():5.1f}"
    )


def main(argv: Sequence[str]) -> None:
    """Print a row per case; `--studies N` for another number of studies."""
    global STUDIES
    if argv:
        STUDIES = int(argv[1])
    looks = planned_looks(LIMIT)
    print(f"looks {', '.join(f'{x.pairs} pairs at {x.level:.4f}' for x in looks)}", flush=True)
    for name, (draw, floor) in DRAWS.items():
        for modes in MODES:
            print(row(f"{name}", draw, floor, modes, looks, True), flush=True)
    print("\nfixed seeds, one look")
    for n in FIXED:
        for modes in MODES:
            name = f"normal, spread 1, {n} seeds"
            print(row(name, normal(1.0), 0.0, modes, [Look(n, ALPHA)], False), flush=True)
    print("\none seed in ten collapses, others spread by 0.1: called equivalent (always wrong)")
    plans = [("seeds=auto", looks), *((f"{n} seeds", [Look(n, ALPHA)]) for n in FIXED)]
    for name, plan in plans:
        wrong = simulated(collapsing(0.1), 1, 0.0, plan, 0.0).equivalent.mean()
        missed = 0.9 ** plan[0].pairs
        print(f"{name:34}{wrong:6.1%}; no seed of the first look collapses: {missed:.1%}")
    print("\nthe habit: a look at 5 % after each of 4, 7, 10, 15 and 20 pairs")
    habit = [Look(x.pairs, ALPHA) for x in looks]
    for spread in (0.7, 1.0, 1.5):
        print(row(f"normal, spread {spread}", normal(spread), 0.0, 1, habit, False), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
