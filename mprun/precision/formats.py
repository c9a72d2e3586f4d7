"""Binary floating-point formats, and the one function that rounds float32 to any of them.

A format of p significand bits (with the leading one), smallest normal number 2^e_min and largest
number M has, at a value of exponent e, numbers that are

    2^(max(e, e_min) - p + 1)

apart: below 2^e_min this spacing is constant (subnormal numbers). Rounding is to nearest, ties to
even. Above M float16, bfloat16 and TF32 have infinity. Conversion to the float8 formats saturates
at M, as hardware and libraries do (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).

There are two ways to round a float32. For a format with float32's exponents all neighbours are
2^(24 - p) float32 bit patterns apart, so an integer addition and a mask do it, also for infinities.
For a smaller exponent range, adding and subtracting 1.5 2^(24 - p) times the power of two below the
value does it: a float32 of that size has the spacing of the format as its last bit, so the
hardware's own rounding is the one needed. Below 2^e_min that power is 2^e_min.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SIGNIFICAND_BITS, SMALLEST_NORMAL = 24, -126
"""Of float32."""


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    name: str
    bits: int
    """Significand bits, the leading one included."""
    smallest_normal: int
    """The exponent of the smallest normal number."""
    largest: float
    saturates: bool = False
    """Whether larger values become the largest number instead of infinity."""

    @property
    def smallest(self) -> int:
        """The exponent of the smallest subnormal number."""
        return self.smallest_normal - self.bits + 1

    @property
    def limit(self) -> float:
        """The smallest magnitude that becomes infinite; the largest number if it saturates."""
        if self.saturates:
            return self.largest
        return self.largest + 2.0 ** (exponent(self.largest) - self.bits)

    def too_large(self, x: Tensor, factor: float) -> Tensor:
        """Whether each of `x` over `factor` exceeds the format's range."""
        limit = self.limit * factor
        return x.abs() > limit if self.saturates else x.abs() >= limit


def exponent(x: float) -> int:
    """e of 2^e <= |x| < 2^(e+1)."""
    return math.frexp(x)[1] - 1


FP16 = Format("fp16", 11, -14, 65504.0)
BF16 = Format("bf16", 8, -126, (2 - 2**-7) * 2.0**127)
TF32 = Format("tf32", 11, -126, (2 - 2**-10) * 2.0**127)
E4M3 = Format("e4m3", 4, -6, 448.0, saturates=True)
"""float8_e4m3fn: no infinity, and its top mantissa is NaN; for weights and activations."""
E5M2 = Format("e5m2", 3, -14, 57344.0, saturates=True)
"""float8_e5m2: more range, less precision; for gradients."""
FORMATS = (FP16, BF16, TF32, E4M3, E5M2)


def quantise(x: Tensor, to: Format, shift: int = 0, overflow: bool = True) -> Tensor:
    """`x` times 2^shift, rounded to `to`, divided by 2^shift again.

    Args:
        x: float32, any shape; finite and below 2^100, except for a format with float32's exponents
            and no shift, which takes every float32.
        shift: the scale's exponent. Only `to` overflows, no intermediate result.
        overflow: False rounds as if the format had no largest number.

    Returns:
        float32 of that shape.
    """
    normal, dropped = to.smallest_normal - shift, SIGNIFICAND_BITS - to.bits
    if overflow and shift == 0 and normal == SMALLEST_NORMAL:
        half = ((x.view(torch.int32) >> dropped) & 1).add_((1 << (dropped - 1)) - 1)
        return add_and_truncate(x, half, dropped)
    if normal > 100 + to.bits:  # half of the smallest number is above all values
        return torch.zeros_like(x)
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    magic = power.clamp(min=2.0**normal).mul_(1.5 * 2.0**dropped)
    rounded = (x + magic).sub_(magic)
    largest = to.largest * 2.0**-shift
    if not overflow or largest > torch.finfo(torch.float32).max:
        return rounded
    if to.saturates:
        return rounded.clamp_(-largest, largest)
    return rounded.masked_fill_(rounded > largest, math.inf).masked_fill_(
        rounded < -largest, -math.inf
    )


def add_and_truncate(x: Tensor, addend: Tensor, dropped: int) -> Tensor:
    """`x` with `addend` added to its bit pattern and the last `dropped` bits cleared.

    Args:
        x: float32; NaN stay NaN.
        addend: int32 of that shape, below 2^dropped: a carry leads to the next number.
        dropped: how many bits of the mantissa go.
    """
    pattern = (x.view(torch.int32) + addend).bitwise_and_(-(1 << dropped))
    # A NaN's pattern could be carried over the top into a number.
    return torch.where(torch.isnan(x), x, pattern.view(torch.float32))
