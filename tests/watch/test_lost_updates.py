"""Lost updates against brute force: exact fractions, NumPy's rounding, all random words."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mprun.optim import SGD
from mprun.precision.rounding import merge, round_stochastic, split
from mprun.watch.updates import DTYPES, LostUpdates, exact_updates, lost_updates
from tests.precision.test_rounding import DROPPED

SIZES = st.floats(-8, 8, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32)


def neighbours(value: Fraction, dtype: torch.dtype) -> tuple[Fraction, Fraction, bool]:
    """The numbers of `dtype` around a value no number of which it is, and whether the lower's even.

    By the definition of the format, in exact fractions.
    """
    bits, least = (11, -14) if dtype == torch.float16 else (8, -126)
    size, exponent = abs(value), least
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (exponent - bits + 1)
    low = size // unit
    found = sorted([low * unit, (low + 1) * unit])
    even = low % 2 == 0
    if value < 0:
        found, even = sorted(-x for x in found), not even
    return found[0], found[1], even


def nearest(value: Fraction, dtype: torch.dtype) -> Fraction:
    low, high, low_is_even = neighbours(value, dtype)
    if value in (low, high):
        return value
    if value - low == high - value:
        return low if low_is_even else high
    return low if value - low < high - value else high


@settings(max_examples=300)
@given(SIZES, SIZES, st.sampled_from([1.0, 2.0**-8, 2.0**-11, 2.0**-20]))
def test_one_weight_by_fractions(weight: float, update: float, factor: float) -> None:
    update *= factor
    found = lost_updates(torch.tensor([weight]), torch.tensor([update], dtype=torch.float64))
    assert found.updated == (update != 0)
    for name, dtype in DTYPES.items():
        if not update:
            assert found.unchanged[f"{name}.nearest"] == 0
            continue
        kept = nearest(Fraction(weight), dtype)
        assert kept == Fraction(torch.tensor(weight).to(dtype).double().item())
        moved = kept + Fraction(update)
        assert found.unchanged[f"{name}.nearest"] == (nearest(moved, dtype) == kept)
        low, high, _ = neighbours(moved, dtype)
        chance = 1 - abs(moved - kept) / (high - low) if kept in (low, high) else 0
        # In float64; subtracted from 1.
        assert found.unchanged[f"{name}.stochastic"] == pytest.approx(float(chance), abs=1e-12)


def drawn(*, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(4000, generator=generator)
    updates = torch.randn(4000, generator=generator) * scale
    updates[::7] = 0
    weights[:50] *= 1e-6
    weights[50:60] = 0
    weights[60:70] = torch.arange(1, 11) * 2.0**-24
    weights[70:80] = 65504.0
    return weights, updates


@pytest.mark.parametrize("scale", [1e-1, 1e-3, 1e-4, 1e-6])
def test_many_weights_in_float16_by_numpy(scale: float) -> None:
    weights, updates = drawn(scale=scale, seed=2)
    w16 = weights.half()
    # float64 holds the sum of a float16 and a float32 here, and NumPy rounds it once.
    moved = (w16.double() + updates.double()).numpy().astype(np.float16)
    lost = int(((moved == w16.numpy()) & (updates.numpy() != 0)).sum())
    found = lost_updates(weights, updates)
    assert found.updated == int((updates != 0).sum())
    assert found.unchanged["fp16.nearest"] == lost
    assert found.share("fp16", "nearest") == lost / found.updated


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("scale", [1e-2, 1e-4])
def test_stochastic_rounding_over_all_its_random_words(dtype: torch.dtype, scale: float) -> None:
    weights, updates = drawn(scale=scale, seed=3)
    weights, updates = weights[::40], updates[::40].clamp(-1, 1)
    kept = weights.to(dtype)
    bits = DROPPED[dtype]
    stays = torch.zeros(len(weights))
    moved = kept.float() + updates  # rounded to float32, as an optimizer's result is
    words = torch.arange(2**bits, dtype=torch.int64) << (32 - bits)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    for n, x in enumerate(moved):
        stays[n] = (round_stochastic(x.expand(len(words)), dtype, words) == kept[n]).float().mean()
    wanted = stays[updates != 0].sum().item()
    name = {v: k for k, v in DTYPES.items()}[dtype]
    found = lost_updates(weights, updates).unchanged[f"{name}.stochastic"]
    # A chance is a multiple of 2^-bits, and of float32's rounding of the sum: less than one more.
    assert found == pytest.approx(wanted, abs=len(weights) * 2.0**-bits * 2)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_kahan_s_by_splitting_and_merging(dtype: torch.dtype) -> None:
    weights, updates = drawn(scale=1e-7, seed=4)
    weights[70:80] = 1.0  # 65504 and a bfloat16 remainder: see below
    kept = merge(*split(weights, dtype))
    after = merge(*split((kept.double() + updates.double()).float(), dtype))
    lost = int(((after == kept) & (updates != 0)).sum())
    name = {v: k for k, v in DTYPES.items()}[dtype]
    assert 0 < lost < 2000
    assert lost_updates(weights, updates).unchanged[f"{name}.kahan"] == lost


def test_ties_go_to_even() -> None:
    even, odd = 1.0, 1 + 2.0**-10  # float16: half a unit is 2^-11
    found = lost_updates(torch.tensor([even, odd]), torch.tensor([2.0**-11, 2.0**-11]))
    assert found.unchanged["fp16.nearest"] == 1
    below = lost_updates(torch.tensor([1.0]), torch.tensor([-(2.0**-12)]))  # a smaller unit there
    assert below.unchanged["fp16.nearest"] == 1
    more = lost_updates(torch.tensor([1.0]), torch.tensor([-(2.0**-12 + 2.0**-30)]))
    assert more.unchanged["fp16.nearest"] == 0


def test_what_is_not_counted() -> None:
    weights = torch.tensor([1.0, 1.0, 1e6, torch.nan, torch.inf, 1.0])
    updates = torch.tensor([0.0, torch.nan, 1.0, 1.0, 1.0, torch.inf])
    assert lost_updates(weights, updates).updated == 0  # 1e6 is no float16
    assert lost_updates(weights, updates).share("fp16", "nearest") is None


def test_what_the_step_really_left() -> None:
    weights = torch.tensor([1.0, 1.0, 1.0])
    updates = torch.tensor([1e-3, 1e-3, 0.0])
    after = torch.tensor([1.0, 1.001, 1.0])
    assert lost_updates(weights, updates, after).lost_in_run == 1
    assert lost_updates(weights, updates, after).shares().lost_in_run == 0.5


def test_counts_add_up() -> None:
    weights, updates = drawn(scale=1e-4, seed=5)
    total = LostUpdates()
    for part in (slice(0, 1000), slice(1000, None)):
        total += lost_updates(weights[part], updates[part])
    whole = lost_updates(weights, updates)
    assert total.updated == whole.updated
    assert total.unchanged == pytest.approx(whole.unchanged)


def test_an_optimizer_s_real_steps_lose_that_many() -> None:
    """The share expected of stochastic rounding, and nearest's, seen in mprun's own optimizer."""
    generator = torch.Generator().manual_seed(6)
    start = torch.randn(20_000, generator=generator)
    gradient = torch.randn(20_000, generator=generator) * 1e-4
    for rounding in ("nearest", "stochastic"):
        p = torch.nn.Parameter(start.bfloat16())
        p.grad = gradient.bfloat16()
        optimizer = SGD([p], lr=10.0, rounding=rounding, engine="eager")
        before, change = exact_updates(optimizer)[p]
        optimizer.step()
        found = lost_updates(before, change, p)
        expected = found.unchanged[f"bf16.{rounding}"]
        # Nearest is certain; of 20,000 coins five standard deviations are below 360.
        assert found.lost_in_run == pytest.approx(expected, abs=0 if rounding == "nearest" else 360)
        assert 0.5 < found.lost_in_run / found.updated < 0.95
