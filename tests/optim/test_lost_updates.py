"""Updates below half a unit: lost by nearest, kept on average by stochastic, kept by kahan.

A step u on a parameter whose neighbour lies one unit away moves it with probability u / unit, so
after n steps the number of moves is binomial with mean n u / unit.
"""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from mprun.optim import SGD, AdamW, LowPrecisionOptimizer, RMSprop
from mprun.optim.formulas import SCALE
from mprun.precision.rounding import merge, round_nearest
from tests.optim import BRAIN, FLOAT, HALF, LOW, give, parameters

COUNT = 10_000
STEPS = 1000
SIGNIFICAND = {BRAIN: 8, HALF: 11}
STEP = {BRAIN: 1e-4, HALF: 2e-5}
"""A fortieth of bfloat16's unit below 1, a 25th of float16's."""
CONFIDENCE = 0.9999
"""Of each interval; the seed is fixed, so a test that passed keeps passing."""


def walked(
    dtype: torch.dtype, rounding: str, update: float, seed: int = 3
) -> tuple[Tensor, LowPrecisionOptimizer]:
    """Parameters of 1.0 after `STEPS` steps of -`update`; a rate of 1 and float32 gradients."""
    (p,) = parameters([torch.ones(COUNT, dtype=dtype)])
    optimizer = SGD([p], lr=1.0, rounding=rounding, seed=seed)
    give(p, torch.full((COUNT,), update))
    for _ in range(STEPS):
        optimizer.step()
    return p.detach(), optimizer


def moved(update: float) -> float:
    """What float32 makes of one step from 1.0; the same at every later one in that binade."""
    one = torch.ones(())
    return abs((one - torch.tensor(update)).double() - 1).item()


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["below 1", "above 1"])
@pytest.mark.parametrize("dtype", LOW)
def test_stochastic_moves_as_binomially_as_it_should(dtype: torch.dtype, sign: float) -> None:
    """In [1/2, 1) a unit is 2^-8 (float16: 2^-11), in [1, 2) twice that."""
    update = sign * STEP[dtype]
    unit = 2.0 ** -SIGNIFICAND[dtype] * (1 if sign > 0 else 2)
    p, _ = walked(dtype, "stochastic", update)
    moves = (1 - p.double()) / unit * sign
    assert torch.equal(moves, moves.round())

    # The update as float32 takes it, to half of 2^-24: within 0.1 % of the one asked for.
    chance = moved(update) / unit
    assert chance == pytest.approx(STEP[dtype] / unit, rel=2e-3)
    exact = stats.binom(STEPS, chance)
    error = exact.std() / COUNT**0.5
    assert abs(moves.mean().item() - exact.mean()) < 4 * error

    # (n - 1) s^2 / sigma^2 is chi-square with n - 1 degrees of freedom for a normal variable; this
    # binomial's excess kurtosis, below 0.08, widens that by less than 2 %.
    low, high = stats.chi2(COUNT - 1).interval(CONFIDENCE)
    assert low < (COUNT - 1) * moves.var().item() / exact.var() < high

    # And the whole distribution: Pearson's chi-square over the counts expected 5 times or more.
    counts = torch.bincount(moves.long(), minlength=STEPS + 1).numpy()
    expected = COUNT * exact.pmf(range(STEPS + 1))
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert statistic < stats.chi2(often.sum()).ppf(CONFIDENCE)


@pytest.mark.representative("dtype0-below 1", "dtype1-above 1")
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["below 1", "above 1"])
@pytest.mark.parametrize("dtype", LOW)
def test_kahan_loses_nothing_that_float32_keeps(dtype: torch.dtype, sign: float) -> None:
    update = sign * STEP[dtype]
    p, optimizer = walked(dtype, "kahan", update)
    (state,) = optimizer.state.values()
    merged = merge(p, state["remainder"])
    wide, _ = walked(FLOAT, "nearest", update)
    assert torch.equal(merged, wide)
    # 2^-25 of rounding (2^-24 above 1) in every step are at most 0.3 % of 2e-5.
    steps = (1 - merged.double()) / STEPS / update
    assert ((steps - 1).abs() < 0.02).all()
    # The parameter itself is at most half a unit (2^-8 at 1) from there.
    assert (p.double() - merged.double()).abs().max() <= 2.0 ** -SIGNIFICAND[dtype]


DECAYS = {BRAIN: 0.999, HALF: 0.9998}
"""Per step, of the second moment; nearest rounding would undo the decay of its root by half."""


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize("kept", LOW)
@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_a_second_moment_in_16_bits_decays_on_average_as_it_should(
    name: str, kept: torch.dtype, rounding: str
) -> None:
    decay, count, steps = DECAYS[kept], 4096, 300
    (p,) = parameters([torch.ones(count, dtype=kept)])
    optimizer: LowPrecisionOptimizer
    if name == "adamw":
        optimizer = AdamW([p], betas=(0.9, decay), variance_dtype=kept, rounding=rounding)
    else:
        optimizer = RMSprop([p], alpha=decay, variance_dtype=kept, rounding=rounding)
    entry = "exp_avg_sq_root" if name == "adamw" else "square_avg_root"
    give(p, torch.rand(count, generator=torch.Generator().manual_seed(0)) + 1)
    optimizer.step()
    root = optimizer.state[p][entry]
    assert root.dtype == kept
    first = root.double()
    give(p, torch.zeros(count))
    for _ in range(steps):
        optimizer.step()

    still = round_nearest(first.float() * decay**0.5, kept)
    assert torch.equal(still.double(), first), "nearest rounding would have moved; a poor test"

    # The root is multiplied by sqrt(decay), which is linear: its mean is exact at every step.
    ratio = optimizer.state[p][entry].double() / first
    error = ratio.std().item() / count**0.5
    # 2^-24 of float32's own rounding in each of some operations a step is far below 1e-4.
    assert abs(ratio.mean().item() - decay ** (steps / 2)) < 4 * error + 1e-4
    # The moment, its square, is larger by the root's variance.
    square = (ratio**2).mean().item() - ratio.var().item()
    assert square == pytest.approx(decay**steps, abs=8 * error + 2e-4)
    assert decay ** (steps / 2) + 100 * error < 1, "no decay to be seen; a poor test"


@pytest.mark.parametrize("kept", LOW)
def test_a_first_moment_in_16_bits_keeps_small_gradients_on_average(kept: torch.dtype) -> None:
    """0.999 of the momentum and 0.001 of a new gradient: nearest rounding stands still."""
    count, steps, beta = 10_000, 300, 0.999
    found = {}
    for rounding in ("nearest", "stochastic"):
        (p,) = parameters([torch.ones(count)])
        optimizer = AdamW([p], betas=(beta, 0.9), rounding=rounding, momentum_dtype=kept, lr=0.0)
        give(p, torch.full((count,), 1000.0))  # a first moment of 1
        optimizer.step()
        give(p, torch.full((count,), 1.0 - 2.0**-4 if kept == HALF else -0.5))
        for _ in range(steps):
            optimizer.step()
        found[rounding] = optimizer.state[p]["exp_avg"].double() / (SCALE if kept == HALF else 1)
    exact = 1.0
    for _ in range(steps):
        exact = beta * exact + (1 - beta) * (1.0 - 2.0**-4 if kept == HALF else -0.5)
    start = torch.tensor(1.0).to(kept).double()
    assert (found["nearest"] == start).all()
    error = found["stochastic"].std().item() / count**0.5
    # 1 - 0.999 in float32 times 1000 is 1 to 2^-24 times a thousand: 6e-5.
    assert abs(found["stochastic"].mean().item() - exact) < 4 * error + 1e-4


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize("param", LOW)
@pytest.mark.parametrize("first", LOW)
@pytest.mark.parametrize("second", LOW)
def test_state_takes_the_memory_it_says(
    param: torch.dtype, first: torch.dtype, second: torch.dtype, rounding: str
) -> None:
    """Two bytes a moment, and two for kahan's remainder."""
    (p,) = parameters([torch.ones(100, dtype=param)])
    optimizer = AdamW(
        [p], momentum_dtype=first, variance_dtype=second, rounding=rounding, engine="eager"
    )
    give(p, torch.ones(100, dtype=param))
    optimizer.step()
    state = optimizer.state[p]
    dtypes = {"exp_avg": first, "exp_avg_sq_root": second, "step": FLOAT}
    if rounding == "kahan":
        dtypes["remainder"] = torch.int16
    assert {name: x.dtype for name, x in state.items()} == dtypes
    taken = sum(x.numel() * x.element_size() for x in state.values())
    assert taken == 100 * (4 if rounding != "kahan" else 6) + 4
