"""Rounding to formats against PyTorch's casts, and the noise it adds against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mprun.numerics.formats import (
    BF16,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    SCALED,
    TF32,
    Format,
    Noise,
    expected_db,
    noise_of,
    rounded,
)
from mprun.numerics.histograms import histogram
from mprun.numerics.sqnr import ratio_db, sqnr_db
from mprun.precision import round_to_tf32

CASTS = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}


def cast(x: Tensor, to: Format) -> Tensor:
    """By PyTorch; values too large for a float8 are brought to its largest number before."""
    if to is TF32:
        return round_to_tf32(x)
    return (x.clamp(-to.largest, to.largest) if to.saturates else x).to(CASTS[to]).float()


def drawn(*, below: float, seed: int = 0, count: int = 200_000) -> Tensor:
    """Random float32 patterns: every exponent as often as any other."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    x = x.view(torch.float32)
    return x[x.abs() < below]  # NaN compares false


@pytest.mark.parametrize("to", FORMATS, ids=lambda f: f.name)
def test_rounding_is_pytorch_s(to: Format) -> None:
    x = drawn(below=2.0**100)
    assert torch.equal(rounded(x, to), cast(x, to))


@pytest.mark.parametrize("to", FORMATS, ids=lambda f: f.name)
def test_ties_go_to_even_and_what_is_too_large_is_infinite_or_the_largest(to: Format) -> None:
    dtype = CASTS.get(to, torch.bfloat16)
    numbers = torch.arange(0, 2 ** (8 * dtype.itemsize - 1))
    numbers = numbers.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).float()
    numbers = numbers[numbers < 2.0**100]
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([to.limit])])
    x = x[x < 2.0**100]
    assert torch.equal(rounded(x, to), cast(x, to))
    assert torch.equal(rounded(-x, to), cast(-x, to))


@pytest.mark.parametrize("shift", [-60, -20, -1, 1, 13, 120])
@pytest.mark.parametrize("to", FORMATS, ids=lambda f: f.name)
def test_a_shift_is_a_multiplication_before_and_a_division_after(to: Format, shift: int) -> None:
    x = drawn(below=4.0)
    x = x[x.abs() > 2.0**-60]
    far = x.double() * 2.0**shift  # may be no float32, which PyTorch's cast would round first
    near = far.abs().clamp(2.0**-149, 3e38) == far.abs()
    x, far = x[near], far[near]
    assert torch.equal(rounded(x, to, shift).double(), cast(far.float(), to).double() / 2.0**shift)


def test_the_numbers_of_the_formats_are_those_of_pytorch() -> None:
    for to, dtype in CASTS.items():
        info = torch.finfo(dtype)
        assert (to.largest, 2.0**to.smallest_normal) == (info.max, info.smallest_normal)
        assert 2.0**to.smallest == info.smallest_normal * info.eps
    assert (FP16.limit, BF16.limit) == (65520.0, 2.0**128 - 2.0**119)


SPREADS = [1.0, 1e-3, 1e-7, 3e-9, 1e-25, 1e-38, 1e3, 1e30]


def sample(spread: float, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(70_000, generator=generator, dtype=torch.float64) * spread).to(dtype)


@pytest.mark.parametrize("spread", SPREADS)
def test_noise_is_that_of_the_casts(spread: float) -> None:
    x = sample(spread)
    found = noise_of(x, histogram(x))
    for to in FORMATS:
        rounded_x = cast(x, to)
        if not torch.isfinite(rounded_x).all():
            assert found.db(to.name) == -math.inf
            continue
        # Sums of 2^16 squares are taken in float32: a hundred-thousandth, 4e-5 dB.
        assert found.db(to.name) == pytest.approx(sqnr_db(x, rounded_x), abs=1e-3)


@pytest.mark.parametrize("spread", SPREADS)
def test_scaled_noise_is_that_of_casts_of_the_scaled_values(spread: float) -> None:
    x = sample(spread).double()
    found = noise_of(x.float(), histogram(x.float()))
    for to in SCALED:
        scale = 2.0 ** math.floor(math.log2(to.largest / x.float().abs().max().double().item()))
        scaled = (x.float().double() * scale).float()  # exact but for values 2^126 below
        assert scaled.abs().max() <= to.largest
        assert scaled.abs().max() > to.largest / 2
        wanted = sqnr_db(scaled, cast(scaled, to))
        assert found.db(f"{to.name}_scaled") == pytest.approx(wanted, abs=1e-3)


def test_noise_of_narrow_and_wide_dtypes() -> None:
    half = sample(1.0, torch.float16)
    found = noise_of(half, histogram(half))
    assert found.db("fp16") == math.inf  # they are float16 numbers
    assert found.db("bf16") == pytest.approx(sqnr_db(half, half.bfloat16()), abs=1e-3)
    wide = sample(1e-60, torch.float64)  # below float32's range
    found = noise_of(wide, histogram(wide))
    assert found.db("bf16") == pytest.approx(0.0)
    assert found.db("e4m3_scaled") == pytest.approx(31.5, abs=0.5)
    assert found.signal == pytest.approx(wide.square().sum().item(), rel=1e-5)


def test_infinities_and_nan_are_left_out() -> None:
    x = sample(1.0)
    with_more = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    without, found = noise_of(x, histogram(x)), noise_of(with_more, histogram(with_more))
    assert found.signal == pytest.approx(without.signal, rel=1e-6)
    assert found.noise == pytest.approx(without.noise, rel=1e-4)


def test_values_too_large_are_counted() -> None:
    x = torch.tensor([65519.0, 65520.0, -1e6, 448.0, 449.0, 57344.0, torch.inf, 3.39e38, 3.4e38])
    above = noise_of(x, histogram(x)).above
    assert above == {"fp16": 4, "bf16": 1, "e4m3": 7, "e5m2": 5}


def test_nothing_but_zeros_has_no_noise() -> None:
    x = torch.zeros(5)
    assert noise_of(x, histogram(x)) == Noise()
    assert Noise().db("fp16") == math.inf


def test_noise_adds_up() -> None:
    a, b = sample(1.0), sample(1e-3)
    together = noise_of(a, histogram(a))
    together += noise_of(b, histogram(b))
    x = torch.cat([a, b])
    whole = noise_of(x, histogram(x))
    assert together.signal == pytest.approx(whole.signal, rel=1e-4)
    for to in FORMATS:
        assert together.db(to.name) == pytest.approx(whole.db(to.name), abs=1e-2)


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**-10])
@pytest.mark.parametrize("spread", [1.0, 1e-5, 1e-6, 1e-7, 3e-8])
def test_noise_expected_of_a_histogram_is_near_the_real_one(spread: float, scale: float) -> None:
    x = sample(spread)
    seen = histogram(x)
    real = sqnr_db(x, (x * scale).half().float() / scale)
    found = expected_db(seen, x.double().square().sum().item(), FP16, scale)
    # Within a power of two values are not spread evenly: at the edge of all becoming 0 that is
    # up to 1 dB, elsewhere a tenth.
    assert found == pytest.approx(real, abs=1.0 if real < 6 else 0.1)


def test_noise_expected_of_overflow_and_of_nothing() -> None:
    seen = histogram(torch.tensor([1.0, 100.0]))
    assert expected_db(seen, 10001.0, FP16, 512.0) > 60
    assert expected_db(seen, 10001.0, FP16, 1024.0) == -math.inf
    assert expected_db(histogram(torch.zeros(3)), 0.0, FP16) == math.inf
    assert expected_db(histogram(torch.tensor([1.0, torch.inf])), 1.0, FP16) == -math.inf


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_no_values_break_it(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    seen = histogram(x)
    found = noise_of(x, seen)
    assert all(n >= 0 for n in found.noise.values())
    assert not any(math.isnan(found.db(name)) for name in found.noise)
    assert expected_db(seen, found.signal, FP16) >= 0 or seen.largest >= FP16.limit


def test_ratios() -> None:
    assert ratio_db(100.0, 1.0) == pytest.approx(20)
    assert ratio_db(1.0, 0.0) == math.inf
    assert ratio_db(0.0, 1.0) == ratio_db(1.0, math.inf) == -math.inf
    assert ratio_db(1e-300, 1e300) == pytest.approx(-6000)  # the quotient would be 0
