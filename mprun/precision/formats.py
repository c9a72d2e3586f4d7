"""Number formats as data, and the one function that rounds float32 numbers to any of them.

A **format** has a sign, E exponent bits, M mantissa bits and a bias. At a value of exponent e its
numbers are 2^(max(e, 1 - bias) - M) apart. The top of its code space, and so its largest number,
differ (Micikevicius et al., "FP8 Formats for Deep Learning", 2022; Open Compute Project's "OFP8"
and "Microscaling Formats (MX)" specifications, 2023):

    ieee   the top exponent is infinity and NaN     float16, bfloat16, TF32, E5M2
    fn     only the top code is NaN                 E4M3
    fnuz   the code of -0 is NaN, there is no -0    E4M3 and E5M2 of AMD's MI300
    none   every code is a number                   E3M2, E2M3, E2M1

A **block format** adds scales, which blocks of numbers share: larger blocks cost fewer bits, in
smaller ones an outlier spoils fewer neighbours. **Stochastic rounding** adds random bits to the
23 - M that are cut off; below the smallest normal number 2^n, that number is added first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mprun.precision import devices
from mprun.precision.random_bits import shift_right

MANTISSA_BITS, SMALLEST_NORMAL = 23, -126  # Of float32
# Largest numbers of blocks below it get the factor of this one, as a larger one may overflow
SMALLEST_SCALED = 2.0**-110
Specials = Literal["ieee", "fn", "fnuz", "none"]
# What becomes of numbers beyond the largest: what the format has there (infinity, else NaN, else
# the largest number); the largest number, also for infinities; they stay, as if it had no largest
Overflow = Literal["special", "saturate", "none"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with a sign."""

    name: str
    exponent_bits: int
    mantissa_bits: int  # Without the leading one
    bias: int
    specials: Specials = "ieee"
    overflow: Overflow = "special"
    """What a conversion makes of too large numbers, unless its caller says otherwise."""

    @property
    def bits(self) -> int:
        """Of a number, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> int:
        """The exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def smallest(self) -> int:
        """The exponent of the smallest subnormal number."""
        return self.smallest_normal - self.mantissa_bits

    @cached_property
    def largest(self) -> float:
        """The largest number."""
        top = 2**self.exponent_bits - 1 - self.bias
        # The top exponent holds infinities and NaN, no numbers
        if self.specials == "ieee":
            top -= 1
        below = 2 if self.specials == "fn" else 1  # the top code is no number
        largest: float = (2 - below * 2.0**-self.mantissa_bits) * 2.0**top
        return largest

    @property
    def largest_exponent(self) -> int:
        """That of the largest number."""
        return exponent(self.largest)

    @property
    def limit(self) -> float:
        """The smallest magnitude that becomes infinite; the largest number if it saturates."""
        if self.overflow == "saturate":
            return self.largest
        # Halfway to what would be the next number: it is even, so IEEE 754 rounds this tie up
        return self.largest + 2.0 ** (self.largest_exponent - self.mantissa_bits - 1)

    @property
    def beyond(self) -> float:
        """What the format has beyond its largest number."""
        special = {"ieee": math.inf, "fn": math.nan, "fnuz": math.nan}
        return special.get(self.specials, self.largest)

    def too_large(self, x: Tensor, factor: float) -> Tensor:
        """Whether each of `x` over `factor` exceeds the format's range."""
        limit = self.limit * factor
        return x.abs() > limit if self.overflow == "saturate" else x.abs() >= limit


def exponent(x: float) -> int:
    """e of 2^e <= |x| < 2^(e+1)."""
    return math.frexp(x)[1] - 1


FP16 = Format("fp16", 5, 10, 15)
BF16 = Format("bf16", 8, 7, 127)
TF32 = Format("tf32", 8, 10, 127)
# float8_e4m3fn; for weights and activations. Hardware and libraries saturate.
E4M3 = Format("e4m3", 4, 3, 7, "fn", "saturate")
# float8_e5m2: more range, less precision; for gradients
E5M2 = Format("e5m2", 5, 2, 15, "ieee", "saturate")
E4M3FNUZ = Format("e4m3fnuz", 4, 3, 8, "fnuz", "saturate")
E5M2FNUZ = Format("e5m2fnuz", 5, 2, 16, "fnuz", "saturate")
E3M2 = Format("e3m2", 3, 2, 3, "none", "saturate")
E2M3 = Format("e2m3", 2, 3, 1, "none", "saturate")
E2M1 = Format("e2m1", 2, 1, 1, "none", "saturate")
FORMATS = (FP16, BF16, TF32, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E3M2, E2M3, E2M1)


@dataclass(frozen=True)
class BlockFormat:
    """Numbers of a format, with scales that blocks of them share."""

    name: str
    element: Format
    block: int | Literal["row", "tensor"]
    """Neighbours along the last dimension that share a scale, the last block may have fewer; or a
    whole row; or the whole tensor."""
    scale: Literal["float32", "power_of_two", "e8m0", "e8m0_up", "e4m3"]
    """How a scale is stored. power_of_two is a float32 that is one; e8m0 is one from 2^-127 to
    2^127, in 8 bits, rounded down (e8m0_up: up); e4m3 has a float32 scale for the tensor beside
    it."""

    @property
    def half_step(self) -> float:
        """By which share of itself a number is moved at most, where the format has its bits."""
        return 2.0 ** -(self.element.mantissa_bits + 1)


# One float32 factor for the tensor brings its largest number to the format's (448); of torchao
FP8_TENSORWISE = BlockFormat("fp8_tensorwise", E4M3, "tensor", "float32")
FP8_TENSORWISE_E5M2 = BlockFormat("fp8_tensorwise_e5m2", E5M2, "tensor", "float32")
# A factor for each row, the power of two below that quotient; of torchao
FP8_ROWWISE = BlockFormat("fp8_rowwise", E4M3, "row", "power_of_two")
# OCP's scale, from 2^floor(log2(largest)): the largest number of a block may be beyond the format's
# range, and saturates
MXFP8 = BlockFormat("mxfp8", E4M3, 32, "e8m0")
# The power of two at or above largest / 448: nothing saturates, which training needs (Mishra et
# al., "Recipes for Pre-training LLMs with MXFP8", 2025)
MXFP8_RCEIL = BlockFormat("mxfp8_rceil", E4M3, 32, "e8m0_up")
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2, 32, "e8m0")
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2, 32, "e8m0")
MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3, 32, "e8m0")
MXFP4 = BlockFormat("mxfp4", E2M1, 32, "e8m0")
# NVIDIA, "Pretraining Large Language Models with NVFP4", 2025
NVFP4 = BlockFormat("nvfp4", E2M1, 16, "e4m3")
BLOCK_FORMATS: tuple[BlockFormat, ...] = (FP8_TENSORWISE, FP8_TENSORWISE_E5M2, FP8_ROWWISE, MXFP8)
BLOCK_FORMATS += (MXFP8_RCEIL, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, NVFP4)

_ALL: tuple[Format | BlockFormat, ...] = (*FORMATS, *BLOCK_FORMATS)
BY_NAME = {x.name: x for x in _ALL}


def quantise(
    x: Tensor,
    to: Format | BlockFormat,
    shift: int = 0,
    overflow: Overflow | None = None,
    bits: Tensor | None = None,
) -> Tensor:
    """`x` times 2^shift, rounded to `to`, divided by 2^shift again.

    Args:
        x: float32, any shape. With `overflow="none"` finite and below 2^100.
        to: the format. A block format takes no shift and no overflow.
        shift: the scale's exponent. Only `to` overflows, no intermediate result.
        overflow: what becomes of too large numbers; None: what the format says.
        bits: int32 of that shape, 32 random bits each: round stochastically; None: to nearest.
            The upper 23 - M of them are used.

    Returns:
        float32 of that shape. NaN stay NaN; signs of zeros stay where the format has them. In a
        block format an infinity or NaN makes NaN of its block, which has no scale then.

    Raises:
        ValueError: a shift or an overflow with a block format.
    """
    if isinstance(to, BlockFormat):
        if shift or overflow is not None:
            raise ValueError(f"shift={shift}, overflow={overflow} with {to.name}; legal: neither")
        return _in_blocks(x, to, bits)
    overflow = overflow or to.overflow
    dropped, normal = MANTISSA_BITS - to.mantissa_bits, to.smallest_normal - shift
    if bits is not None:
        rounded = _stochastic(x, bits, normal, dropped)
    elif overflow != "none" and normal == SMALLEST_NORMAL:
        # With float32's exponents all neighbours are 2^dropped patterns apart, so an integer
        # addition rounds. It adds just less than half of that, and 1 more where the last bit that
        # stays is odd: only then a tie is carried, to the even neighbour.
        half = ((x.view(torch.int32) >> dropped) & 1).add_((1 << (dropped - 1)) - 1)
        rounded = add_and_truncate(x, half, dropped)
    elif normal > 101 + to.mantissa_bits:  # half of the smallest number is above all values
        rounded = torch.zeros_like(x)
    else:
        rounded = _nearest(x, to, shift, overflow)
    if overflow != "none":
        rounded = _limited(rounded, to, shift, overflow)
    # -0 + 0 is 0, as fnuz has no -0. Elsewhere a negative number that became 0 gets its sign back.
    return rounded.add_(0.0) if to.specials == "fnuz" else rounded.copysign_(x)


def _nearest(x: Tensor, to: Format, shift: int, overflow: Overflow) -> Tensor:
    """To nearest, by an addition that drops the right bits."""
    bounded = x
    if overflow != "none":  # larger ones, infinities too, are as much too large as the bound
        # At most 2^100, so that `magic` is finite: 1.5 * 2^23 times it is below 2^124
        bound = 2.0 ** min(to.largest_exponent + 2 - shift, 100)
        bounded = x.clamp(-bound, bound)
    # The bits of the exponent alone: the power of two at or below the magnitude
    power = (bounded.view(torch.int32) & 0x7F800000).view(torch.float32)
    normal, dropped = to.smallest_normal - shift, MANTISSA_BITS - to.mantissa_bits
    # A float32 of this size has the format's spacing as its last bit, so the addition rounds as
    # needed, ties to even. 1.5 and not 1: with a negative addend the sum stays in the same binade.
    # Below the smallest normal number the spacing is constant, hence the clamp.
    magic = power.clamp(min=2.0**normal).mul_(1.5 * 2.0**dropped)
    return (bounded + magic).sub_(magic)


def _stochastic(x: Tensor, bits: Tensor, normal: int, dropped: int) -> Tensor:
    """`x` with random words added to what is cut off."""
    word = shift_right(bits, 32 - dropped)
    if normal == SMALLEST_NORMAL:
        return add_and_truncate(x, word, dropped)
    start = torch.full_like(x, 2.0**normal).copysign_(x)
    small = x.abs() < 2.0**normal
    rounded = add_and_truncate(torch.where(small, x + start, x), word, dropped)
    return torch.where(small, rounded - start, rounded)  # the difference is exact


def _limited(rounded: Tensor, to: Format, shift: int, overflow: Overflow) -> Tensor:
    """Rounded numbers, the too large ones replaced."""
    largest = to.largest * 2.0**-shift
    if overflow == "saturate" or to.beyond == to.largest:
        return rounded.clamp_(-largest, largest)
    if to.specials == "ieee" and to.smallest_normal - shift == SMALLEST_NORMAL:
        return rounded  # infinities have float32's code
    # No float32 number is above it
    if largest > torch.finfo(torch.float32).max:
        return rounded
    return rounded.masked_fill_(rounded.abs() > largest, to.beyond)


def _in_blocks(x: Tensor, to: BlockFormat, bits: Tensor | None) -> Tensor:
    """Every block over its scale, rounded, times the scale."""
    if to.block == "tensor":
        return _scaled(x.reshape(1, -1), to, bits).view(x.shape)
    # A row of at most one block needs no padding
    if to.block == "row" or x.shape[-1] <= to.block:
        return _scaled(x, to, bits)
    # Zeros do not change the largest number of the last block
    missing = -x.shape[-1] % to.block
    blocks = torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, to.block))
    if bits is not None:
        bits = torch.nn.functional.pad(bits, (0, missing)).unflatten(-1, (-1, to.block))
    return _scaled(blocks, to, bits).flatten(-2)[..., : x.shape[-1]].contiguous()


def _scaled(x: Tensor, to: BlockFormat, bits: Tensor | None) -> Tensor:
    """Blocks [..., n] rounded with a scale each."""
    if not x.numel():
        return x.clone()
    largest = x.abs().amax(-1, keepdim=True)
    if to.scale in ("float32", "power_of_two"):
        bad = ~torch.isfinite(largest)
        # In float64, rounded once to float32: torchao's order of operations, so its bits
        factor = (to.element.largest / devices.wide(largest).clamp_min(SMALLEST_SCALED)).float()
        if to.scale == "power_of_two":
            # Without its mantissa the factor is the power of two below: nothing saturates
            factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
        return torch.where(bad, math.nan, quantise(x * factor, to.element, bits=bits) / factor)
    scale = scales(largest, to)
    rounded = quantise(x / scale, to.element, bits=bits) * scale
    return torch.where(scale > 0, rounded, scale * x)  # a zero, or NaN, for the whole block


def scales(largest: Tensor, to: BlockFormat) -> Tensor:
    """What the numbers of each block are divided by, in a format with e8m0 or e4m3 scales.

    `largest` is the largest magnitude of each block, float32; of a format with a scale for the
    tensor, it has all blocks of it. The result is 0 where a block is so much smaller than the
    largest of its tensor that its scale vanishes; NaN where a block holds an infinity or NaN.
    """
    bad = ~torch.isfinite(largest)
    if to.scale in ("e8m0", "e8m0_up"):
        if to.scale == "e8m0":
            _, after = torch.frexp(largest)  # largest is below 2^after
            power = after - 1 - to.element.largest_exponent
        else:
            part, after = torch.frexp(largest / to.element.largest)
            power = after - (part == 0.5).int()  # a power of two itself
        # The range of E8M0, which has no sign and no zero
        power = power.clamp(-127, 127)
        scale = torch.ldexp(torch.ones_like(largest), power)
        scale = torch.where(largest > 0, scale, 2.0**-127)
    else:
        # A block that is not finite must not decide the scale of all others
        known = torch.where(bad, 0.0, largest)
        # At least the smallest normal float32: a tensor of zeros is not divided by 0
        outer = (known.amax() / (to.element.largest * E4M3.largest)).clamp_min(2.0**-126)
        scale = quantise(known / (to.element.largest * outer), E4M3) * outer
    return torch.where(bad, math.nan, scale)


def add_and_truncate(x: Tensor, addend: Tensor, dropped: int) -> Tensor:
    """`x` with `addend` added to its bit pattern and the last `dropped` bits cleared; NaN stay NaN.

    `addend` is int32, below 2^dropped: a carry leads to the next number.
    """
    pattern = (x.view(torch.int32) + addend).bitwise_and_(-(1 << dropped))
    # A NaN's pattern could be carried over the top into a number: all its bits are set
    return pattern.bitwise_or_(x.clone().ne_(x).int().neg_()).view(torch.float32)


@dataclass(frozen=True)
class Float16Range:
    """How many of some values leave float16's normal range."""

    total: int
    overflow: int  # Those that become infinite; infinite ones among them
    zero: int  # Those that become zero and were not
    subnormal: int  # Those that become subnormal, where fewer bits are left the smaller they are

    def __str__(self) -> str:
        shares = [self._share(n) for n in (self.overflow, self.zero, self.subnormal)]
        return (
            f"{self.overflow:,} of {self.total:,} overflow ({shares[0]}), "
            f"{self.zero:,} become zero ({shares[1]}), "
            f"{self.subnormal:,} become subnormal, with fewer bits ({shares[2]})"
        )

    def _share(self, count: int) -> str:
        percent = 100 * count / self.total if self.total else 0.0
        if 0 < percent < 0.001:
            return "below 0.001 %"
        return f"{percent:.3f}".rstrip("0").rstrip(".") + " %"


def float16_range(tensors: Iterable[Tensor]) -> Float16Range:
    """Count the values of `tensors` (any shapes, floating dtypes) that leave float16's range."""
    counts = torch.zeros(4, dtype=torch.int64)
    for tensor in tensors:
        wide = tensor.detach().float()
        low = wide.half().abs()
        zero, small = low == 0, low < 2.0**-14
        found = [low.isinf(), zero & (wide != 0), small & ~zero]
        counts += torch.tensor([wide.numel(), *(int(x.sum()) for x in found)])
    return Float16Range(*counts.tolist())
