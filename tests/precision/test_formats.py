"""Rounding to formats equals `ml_dtypes`, `gfloat` and PyTorch's casts, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import RoundMode, compute_scale_amax, quantize_block, round_ndarray
from gfloat import formats as gfloat_formats
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mprun.precision.formats import (
    BF16,
    BLOCK_FORMATS,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FORMATS,
    FP16,
    MANTISSA_BITS,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    MXFP8_E5M2,
    MXFP8_RCEIL,
    NVFP4,
    TF32,
    BlockFormat,
    Format,
    quantise,
    scales,
)
from tests.each import each

CASTS = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E4M3FNUZ: torch.float8_e4m3fnuz,
    E5M2FNUZ: torch.float8_e5m2fnuz,
}
ML_DTYPES = {
    FP16: np.float16,
    BF16: ml_dtypes.bfloat16,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E2M1: ml_dtypes.float4_e2m1fn,
}
GFLOAT = {
    FP16: gfloat_formats.format_info_binary16,
    BF16: gfloat_formats.format_info_bfloat16,
    E4M3: gfloat_formats.format_info_ocp_e4m3,
    E5M2: gfloat_formats.format_info_ocp_e5m2,
    E3M2: gfloat_formats.format_info_ocp_e3m2,
    E2M3: gfloat_formats.format_info_ocp_e2m3,
    E2M1: gfloat_formats.format_info_ocp_e2m1,
}
GFLOAT_BLOCKS = {
    MXFP8: gfloat_formats.format_info_mxfp8_e4m3,
    MXFP8_E5M2: gfloat_formats.format_info_mxfp8_e5m2,
    MXFP6_E3M2: gfloat_formats.format_info_mxfp6_e3m2,
    MXFP6_E2M3: gfloat_formats.format_info_mxfp6_e2m3,
    MXFP4: gfloat_formats.format_info_mxfp4_e2m1,
}


def named(to: Format | BlockFormat) -> str:
    return to.name


def every(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a 16-bit dtype, in float32."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether the numbers are equal with their signs; a NaN is a NaN."""
    equal = a.view(torch.int32) == b.view(torch.int32)
    return bool((equal | (a.isnan() & b.isnan())).all())


def random_words(like: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, like.shape, generator=generator).to(torch.int32)


@each("dtype", [torch.bfloat16, torch.float16])
@each("to", ML_DTYPES, ids=named)
def test_every_16_bit_number_is_rounded_as_by_ml_dtypes(to: Format, dtype: torch.dtype) -> None:
    x = every(dtype)
    if to.specials == "none":
        x = x[~x.isnan()]  # ml_dtypes makes a zero of NaN there, mprun leaves it
    with np.errstate(all="ignore"):
        expected = x.numpy().astype(ML_DTYPES[to]).astype(np.float32)
    assert same_bits(quantise(x, to, overflow="special"), torch.from_numpy(expected))


@each("dtype", [torch.bfloat16, torch.float16])
@each("overflow", ["special", "saturate"])
@each("to", GFLOAT, ids=named)
def test_every_16_bit_number_is_rounded_stochastically_as_by_gfloat(
    to: Format, overflow: str, dtype: torch.dtype
) -> None:
    """gfloat has the same definition of stochastic rounding, with as many bits as are cut off."""
    x = every(dtype)
    if to.specials == "none":
        x = x[x.isfinite()]  # gfloat raises an error, mprun leaves NaN
        overflow = "saturate"
    words, count = random_words(x), MANTISSA_BITS - to.mantissa_bits
    upper = (words.long() & 0xFFFFFFFF).numpy() >> (32 - count)
    how = RoundMode.Stochastic, overflow == "saturate", upper, count
    expected = round_ndarray(GFLOAT[to], x.double().numpy(), *how)
    result = quantise(x, to, overflow=overflow, bits=words)  # type: ignore[arg-type]
    assert same_bits(result, torch.from_numpy(expected).float())


@each("to", FORMATS, ids=named)
def test_the_mean_of_stochastic_rounding_is_the_number(to: Format) -> None:
    """Over all 2^16 words that differ in their upper bits: exactly so, but for the bits below."""
    words = (torch.arange(2**16) << 16).to(torch.int32)
    for x in (1.2345, -0.777, 2.0**to.smallest * 0.3):
        value = torch.full((2**16,), x)
        rounded = quantise(value, to, overflow="none", bits=words).double()
        gap = (rounded.max() - rounded.min()).item()
        assert gap > 0
        assert abs(rounded.mean().item() - value[0].item()) <= gap * 2.0**-14  # 16 bits decide


@each("to", [*FORMATS, MXFP8, MXFP4], ids=named)
@settings(max_examples=30)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_of_the_format_stay(to: Format | BlockFormat, numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    once = quantise(x, to)
    once = once[once.isfinite()]
    assert same_bits(quantise(once, to), once)
    if isinstance(to, Format):
        assert same_bits(quantise(once, to, bits=random_words(once)), once)


def spread_out(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normal numbers whose size differs from number to number and from row to row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    sizes = torch.randint(-12, 12, (rows, columns), generator=generator)
    return torch.ldexp(x, sizes + torch.arange(rows)[:, None] * 3 - 60)


@each("columns", [80, 7])  # two whole blocks and a part of one; a part alone
@each("to", GFLOAT_BLOCKS, ids=named)
def test_blocks_of_mx_formats_are_those_of_gfloat(to: BlockFormat, columns: int) -> None:
    x = torch.cat([spread_out(40, columns), spread_out(30, columns, 1) * 2.0**-80])
    x = torch.cat([x, spread_out(20, columns, 2) * 2.0**100])
    x[3], x[4, ::2] = 0.0, 0.0
    expected = torch.empty_like(x)
    for row, out in zip(x, expected, strict=True):
        for start in range(0, columns, 32):
            block = row[start : start + 32].double().numpy()
            rounded = quantize_block(GFLOAT_BLOCKS[to], block, compute_scale_amax)
            out[start : start + 32] = torch.from_numpy(rounded)
    assert same_bits(quantise(x, to), expected)


@each("columns", [16, 48, 50])
def test_nvfp4_is_its_definition(columns: int) -> None:
    """The block's scale in E4M3, relative to the tensor's, by `ml_dtypes`."""
    x = spread_out(3, columns).numpy()
    outer = np.float32(np.abs(x).max()) / np.float32(6 * 448)
    expected = np.empty_like(x)
    for row, out in zip(x, expected, strict=True):
        for start in range(0, columns, 16):
            block = row[start : start + 16]
            scale = np.abs(block).max() / (np.float32(6) * outer)
            scale = min(scale, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
            factor = scale.astype(np.float32) * outer
            if factor == 0:
                out[start : start + 16] = block * factor
                continue
            rounded = (block / factor).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
            out[start : start + 16] = rounded * factor
    assert same_bits(quantise(torch.from_numpy(x), NVFP4), torch.from_numpy(expected))


@each("to", BLOCK_FORMATS, ids=named)
def test_an_infinity_or_nan_spoils_its_own_block_alone(to: BlockFormat) -> None:
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = spread_out(2, 64)
        x[1] = x[0]
        expected = quantise(x, to)
        x[1, 40] = bad
        spoilt = quantise(x, to).isnan()
        if to.block == "tensor":
            assert spoilt.all()
            continue
        first, last = (0, 64) if to.block == "row" else (40 - 40 % int(to.block), 0)
        last = last or first + int(to.block)
        assert spoilt[1, first:last].all()
        assert spoilt.sum() == last - first
        assert same_bits(quantise(x, to)[0], expected[0])


@each("to", BLOCK_FORMATS, ids=named)
def test_blocks_are_rounded_stochastically_around_the_numbers(to: BlockFormat) -> None:
    x = torch.rand(1, 32, generator=torch.Generator().manual_seed(1)) + 0.01
    x[0, 0] = x[0, 16] = 1.5  # the largest of each block: no scale is rounded below it
    rows = x.expand(3_000, 32).contiguous()  # alike, so with the scales of one
    words = random_words(rows)
    many = quantise(rows.view(1, -1), to, bits=words.view(1, -1)).view(rows.shape)
    gap = (many.amax(0) - many.amin(0)).clamp_min(1e-6)
    # A rounding's standard deviation is at most half of the gap; five of the mean of 3,000.
    assert ((many.mean(0) - x).abs() <= 5 * gap / 2 / 3_000**0.5 + 1e-6).all()


def test_empty_tensors_zeros_and_single_numbers_have_blocks_too() -> None:
    for to in BLOCK_FORMATS:
        assert quantise(torch.empty(0, 32), to).shape == (0, 32)
        assert torch.equal(quantise(torch.zeros(3, 40), to), torch.zeros(3, 40))
        assert quantise(torch.full((1,), 3.0), to) == 3.0


def test_a_block_format_refuses_a_shift_and_an_overflow() -> None:
    with pytest.raises(ValueError, match="legal: neither"):
        quantise(torch.ones(2), MXFP8, shift=1)
    with pytest.raises(ValueError, match="legal: neither"):
        quantise(torch.ones(2), NVFP4, overflow="special")


def cast(x: Tensor, to: Format) -> Tensor:
    """`x` rounded by PyTorch's cast, or `ml_dtypes`'; TF32, which has none, in float64.

    Values too large for a format that saturates are brought to its largest number before.
    """
    if to is TF32:
        mantissa, exponent = torch.frexp(x.double())
        kept = torch.where(exponent > -126, 11, 11 + exponent + 125)
        return torch.ldexp(torch.round(torch.ldexp(mantissa, kept)), exponent - kept).float()
    x = x.clamp(-to.largest, to.largest) if to.overflow == "saturate" else x
    if to in CASTS:
        return x.to(CASTS[to]).float()
    return torch.from_numpy(x.numpy().astype(ML_DTYPES[to]).astype(np.float32))


def drawn(*, below: float, seed: int = 0, count: int = 200_000) -> Tensor:
    """Random float32 patterns: every exponent as often as any other."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    x = x.view(torch.float32)
    return x[x.abs() < below]  # NaN compares false


@each("to", FORMATS, ids=named)
def test_rounding_is_pytorch_s(to: Format) -> None:
    x = drawn(below=2.0**100)
    assert torch.equal(quantise(x, to), cast(x, to))


@each("to", FORMATS, ids=named)
def test_ties_go_to_even_and_what_is_too_large_is_infinite_or_the_largest(to: Format) -> None:
    dtype = CASTS.get(to, torch.bfloat16)
    numbers = torch.arange(0, 2 ** (8 * dtype.itemsize - 1))
    numbers = numbers.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).float()
    numbers = numbers[numbers < 2.0**100]
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([to.limit])])
    x = x[x < 2.0**100]
    assert torch.equal(quantise(x, to), cast(x, to))
    assert torch.equal(quantise(-x, to), cast(-x, to))


@each("shift", [-60, -20, -1, 1, 13, 120])
@each("to", FORMATS, ids=named)
def test_a_shift_is_a_multiplication_before_and_a_division_after(to: Format, shift: int) -> None:
    x = drawn(below=4.0)
    x = x[x.abs() > 2.0**-60]
    far = x.double() * 2.0**shift  # may be no float32, which PyTorch's cast would round first
    near = far.abs().clamp(2.0**-149, 3e38) == far.abs()
    x, far = x[near], far[near]
    assert torch.equal(quantise(x, to, shift).double(), cast(far.float(), to).double() / 2.0**shift)


def test_the_numbers_of_the_formats_are_those_of_pytorch() -> None:
    for to, dtype in CASTS.items():
        info = torch.finfo(dtype)
        assert (to.largest, 2.0**to.smallest_normal) == (info.max, info.smallest_normal)
        code = torch.tensor([1], dtype={1: torch.uint8, 2: torch.int16}[dtype.itemsize])
        assert 2.0**to.smallest == code.view(dtype).item()  # PyTorch 2.14's eps of E5M2FNUZ is off
    assert (FP16.limit, BF16.limit) == (65520.0, 2.0**128 - 2.0**119)


def test_every_float32_can_be_rounded_to_formats_with_its_exponents() -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, 1e-45])
    x = torch.cat([drawn(below=torch.inf), special])
    for to in (BF16, TF32):
        result, expected = quantise(x, to), cast(x, to)
        assert torch.equal(result.isnan(), expected.isnan())
        kept = ~x.isnan()
        assert torch.equal(result[kept], expected[kept])
        assert torch.equal(result[kept].signbit(), x[kept].signbit())


def test_rounded_up_scales_are_the_smallest_that_saturate_nothing() -> None:
    powers = 2.0 ** torch.arange(-20, 21)
    drawn = torch.rand(500) * 2.0 ** torch.randint(-100, 100, (500,))
    largest = torch.cat([drawn, powers * 448])
    scale = scales(largest, MXFP8_RCEIL)
    assert (torch.frexp(scale)[0] == 0.5).all()
    assert (largest <= 448 * scale).all()
    assert (largest > 224 * scale).all()
    assert torch.equal(scales(powers * 448, MXFP8_RCEIL), powers)
