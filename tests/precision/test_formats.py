"""Rounding to formats equals PyTorch's casts, bit for bit, and float64 arithmetic for TF32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mprun.precision.formats import BF16, E4M3, E5M2, FORMATS, FP16, TF32, Format, quantise

CASTS = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}


def cast(x: Tensor, to: Format) -> Tensor:
    """`x` rounded by PyTorch's cast; TF32, which has none, in float64.

    Values too large for a float8 are brought to its largest number before.
    """
    if to is TF32:
        mantissa, exponent = torch.frexp(x.double())
        kept = torch.where(exponent > -126, 11, 11 + exponent + 125)
        return torch.ldexp(torch.round(torch.ldexp(mantissa, kept)), exponent - kept).float()
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
    assert torch.equal(quantise(x, to), cast(x, to))


@pytest.mark.parametrize("to", FORMATS, ids=lambda f: f.name)
def test_ties_go_to_even_and_what_is_too_large_is_infinite_or_the_largest(to: Format) -> None:
    dtype = CASTS.get(to, torch.bfloat16)
    numbers = torch.arange(0, 2 ** (8 * dtype.itemsize - 1))
    numbers = numbers.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype).float()
    numbers = numbers[numbers < 2.0**100]
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([to.limit])])
    x = x[x < 2.0**100]
    assert torch.equal(quantise(x, to), cast(x, to))
    assert torch.equal(quantise(-x, to), cast(-x, to))


@pytest.mark.parametrize("shift", [-60, -20, -1, 1, 13, 120])
@pytest.mark.parametrize("to", FORMATS, ids=lambda f: f.name)
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
        assert 2.0**to.smallest == info.smallest_normal * info.eps
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
