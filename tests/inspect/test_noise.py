"""The noise of rounding to formats equals its definition, taken from PyTorch's casts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mprun.inspect.histograms import FORMATS, SCALED, Noise, expected_db, histogram, noise_of
from mprun.precision.formats import (
    E2M1,
    E3M2,
    FP8_ROWWISE,
    FP16,
    MXFP4,
    MXFP8,
    NVFP4,
    BlockFormat,
    Format,
    quantise,
)
from mprun.precision.rounding import sqnr_db
from tests.precision.test_formats import cast

SPREADS = [1.0, 1e-3, 1e-7, 3e-9, 1e-25, 1e-38, 1e3, 1e30]


def sample(spread: float, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(70_000, generator=generator, dtype=torch.float64) * spread).to(dtype)


@pytest.mark.parametrize("spread", SPREADS)
def test_noise_is_that_of_the_casts(spread: float) -> None:
    x = sample(spread)
    result = noise_of(x, histogram(x))
    for to in FORMATS:
        rounded_x = cast(x, to)
        if not torch.isfinite(rounded_x).all():
            assert result.db(to.name) == -math.inf
            continue
        # Sums of 2^16 squares are taken in float32: a hundred-thousandth, 4e-5 dB.
        assert result.db(to.name) == pytest.approx(sqnr_db(x, rounded_x), abs=1e-3)


@pytest.mark.parametrize("spread", SPREADS)
def test_scaled_noise_is_that_of_casts_of_the_scaled_values(spread: float) -> None:
    x = sample(spread).double()
    result = noise_of(x.float(), histogram(x.float()))
    for to in SCALED:
        scale = 2.0 ** math.floor(math.log2(to.largest / x.float().abs().max().double().item()))
        scaled = (x.float().double() * scale).float()  # exact but for values 2^126 below
        assert scaled.abs().max() <= to.largest
        assert scaled.abs().max() > to.largest / 2
        wanted = sqnr_db(scaled, cast(scaled, to))
        assert result.db(f"{to.name}_scaled") == pytest.approx(wanted, abs=1e-3)


def test_noise_of_narrow_and_wide_dtypes() -> None:
    half = sample(1.0, torch.float16)
    result = noise_of(half, histogram(half))
    assert result.db("fp16") == math.inf  # they are float16 numbers
    assert result.db("bf16") == pytest.approx(sqnr_db(half, half.bfloat16()), abs=1e-3)
    wide = sample(1e-60, torch.float64)  # below float32's range
    result = noise_of(wide, histogram(wide))
    assert result.db("bf16") == pytest.approx(0.0)
    assert result.db("e4m3_scaled") == pytest.approx(31.5, abs=0.5)
    assert result.signal == pytest.approx(wide.square().sum().item(), rel=1e-5)


def test_infinities_and_nan_are_left_out() -> None:
    x = sample(1.0)
    with_more = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    without, result = noise_of(x, histogram(x)), noise_of(with_more, histogram(with_more))
    assert result.signal == pytest.approx(without.signal, rel=1e-6)
    assert result.noise == pytest.approx(without.noise, rel=1e-4)


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
    result = expected_db(seen, x.double().square().sum().item(), FP16, scale)
    # Within a power of two values are not spread evenly: at the edge of all becoming 0 that is
    # up to 1 dB, elsewhere a tenth.
    assert result == pytest.approx(real, abs=1.0 if real < 6 else 0.1)


def test_noise_expected_of_overflow_and_of_nothing() -> None:
    seen = histogram(torch.tensor([1.0, 100.0]))
    assert expected_db(seen, 10001.0, FP16, 512.0) > 60
    assert expected_db(seen, 10001.0, FP16, 1024.0) == -math.inf
    assert expected_db(histogram(torch.zeros(3)), 0.0, FP16) == math.inf
    assert expected_db(histogram(torch.tensor([1.0, torch.inf])), 1.0, FP16) == -math.inf


@settings(max_examples=100)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_no_values_break_it(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    seen = histogram(x)
    result = noise_of(x, seen)
    assert all(n >= 0 for n in result.noise.values())
    assert not any(math.isnan(result.db(name)) for name in result.noise)
    assert expected_db(seen, result.signal, FP16) >= 0 or seen.largest >= FP16.limit


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("to", [E2M1, E3M2, MXFP8, NVFP4, FP8_ROWWISE], ids=lambda f: f.name)
def test_further_formats_have_a_scale_whatever_the_size(
    to: Format | BlockFormat, spread: float
) -> None:
    x = sample(spread).view(100, 700)
    db = noise_of(x, histogram(x), [to]).db(to.name)
    # The same numbers near 1, where nothing under- or overflows; a power of two changes no bit.
    near = (x.double() * 2.0 ** -math.frexp(x.abs().max().item())[1]).float()
    low = quantise(near, to)
    if isinstance(to, Format):  # with the largest power of two at which nothing overflows
        by = next(p for p in range(10, -10, -1) if near.abs().max() * 2.0**p <= to.largest)
        low = quantise(near * 2.0**by, to) * 2.0**-by
    assert db == pytest.approx(sqnr_db(near, low), abs=1e-3)


def test_convolutions_have_blocks_along_their_channels() -> None:
    x = torch.randn(4, 64, 3, 3, generator=torch.Generator().manual_seed(0))
    x[:, :, 0, 0] *= 1e4  # would spoil its neighbours in a row
    low = quantise(x.permute(0, 2, 3, 1), MXFP4).permute(0, 3, 1, 2)
    assert noise_of(x, histogram(x), [MXFP4]).db("mxfp4") == pytest.approx(
        sqnr_db(x, low), abs=1e-3
    )
    assert (low[:, :, 1, 1] != 0).any()
