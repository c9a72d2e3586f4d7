"""Rounding float32 to 16 bits: to nearest, stochastically, or with a remainder.

Seen as an integer a float32's magnitude grows with the number. **bfloat16** is its upper half: a
number whose lower half is f is carried to the upper neighbour by f of the 2^16 integers that can be
added, so the expected result is the number (Croci et al., "Stochastic rounding", 2022). **float16**
has 10 bits of mantissa; 2^-14 is added to a number below 2^-14 first, so the expected result is off
by at most 2^-38 there. Zeros, infinities and NaN do not change. A number beyond the largest one
becomes infinity, or with `saturate` that largest number, as on Graphcore's IPU.

**Kahan**'s method (1965) stores the remainder that rounding to nearest cuts off, in 16 bits:
`merge` gives back what `split` took apart. **Masters of 24 bits** have 8 bits beside the parameter,
3 bytes instead of 4; the master is rounded stochastically, the parameter to nearest.

`stochastic` rounds a whole tensor by a compiled kernel (`kernels/`) where there is one, with the
same bits. The addition of random bits itself is `formats.add_and_truncate`.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from mprun.precision import kernels
from mprun.precision.formats import BF16, FP16, quantise
from mprun.precision.random_bits import Key, random_bits, shift_right, spans

OVERFLOWS = ("infinity", "saturate")
DTYPES = (torch.float16, torch.bfloat16)
FORMATS = {torch.float16: FP16, torch.bfloat16: BF16}

_SMALLEST_NORMAL = 2.0**-14


def round_nearest(x: Tensor, dtype: torch.dtype, overflow: str = "infinity") -> Tensor:
    """`x` (float32) to the nearest number of `dtype` (16 bits), ties to even: PyTorch's cast."""
    return _saturated(x.to(dtype), x, overflow)


def round_stochastic(
    x: Tensor, dtype: torch.dtype, bits: Tensor, overflow: str = "infinity"
) -> Tensor:
    """`x` (float32) to one of its two neighbours in `dtype`, the nearer one with more chance.

    Args:
        x: float32, any shape.
        dtype: float16 or bfloat16.
        bits: int32 of that shape, 32 random bits each; the upper 13 (float16) or 16 are used.
        overflow: infinity or saturate.

    Returns:
        The rounded numbers in `dtype`; a number of `dtype` does not change.
    """
    # No limit here: the cast to 16 bits makes the infinities
    rounded = quantise(x, FORMATS[dtype], overflow="none", bits=bits)
    return _saturated(rounded.to(dtype), x, overflow)


def _saturated(rounded: Tensor, x: Tensor, overflow: str) -> Tensor:
    if overflow == "infinity":
        return rounded
    largest = torch.finfo(rounded.dtype).max
    # An infinity was not rounded: it stays infinite, as on Graphcore's IPU
    return torch.where(torch.isfinite(x), rounded.clamp(-largest, largest), rounded)


def split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` (float32) rounded to nearest, and what that cut off.

    Returns:
        The rounded numbers in `dtype` (ties away from zero in bfloat16, where the remainder of a
        tie to even would not fit), and the remainders, int16, in float32 patterns. Where a finite
        number rounds to infinity in float16 the remainder is 0, and it stays an infinity.
    """
    if dtype == torch.bfloat16:
        pattern = x.view(torch.int32)
        # Half of the distance between neighbours, then the lower half cleared: ties away from zero.
        # To even, the remainder of a tie could be 0x8000, which int16 lacks.
        nearest = (pattern + 0x8000) & -0x10000
        # The addition would carry some NaN over the top of int32
        nearest = torch.where(torch.isfinite(x), nearest, pattern & -0x10000)
        wide = torch.where(torch.isnan(x), x, nearest.view(torch.float32))
    else:
        wide = quantise(x, FORMATS[dtype], overflow="special")
    # Not from the result: Inductor up to PyTorch 2.12 leaves out the cast of what is also stored.
    return wide.to(dtype), _rest(x, wide, dtype)


def _rest(x: Tensor, wide: Tensor, dtype: torch.dtype) -> Tensor:
    """The remainder of `x` (float32) beside `wide`, which it was rounded to: see `split`."""
    if dtype == torch.bfloat16:
        remainder = x.view(torch.int32) - wide.view(torch.int32)
        return torch.where(torch.isfinite(x), remainder, 0).to(torch.int16)
    # Moved up by 2^-14, subnormals have the spacing of the normal numbers above, 2^13 patterns: the
    # remainder fits 16 bits
    shift = torch.full_like(x, _SMALLEST_NORMAL).copysign(x)
    small = wide.abs() < _SMALLEST_NORMAL
    remainder = torch.where(small, x + shift, x).view(torch.int32)
    remainder = remainder - torch.where(small, wide + shift, wide).view(torch.int32)
    # Beside a number that became infinite a remainder would mean nothing
    return torch.where(torch.isfinite(wide), remainder, 0).to(torch.int16)


def merge(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers that `split` took apart.

    If other code has written the rounded number since, the remainder belongs to another number. It
    then moves the number by at most half the distance to its neighbour (in float16 by the whole
    distance if it was cut off 2^-14). It is left out if it would carry the number past zero or
    infinity.
    """
    wide = rounded.float()
    magnitude = wide.abs()
    if rounded.dtype == torch.bfloat16:
        whole = (magnitude.view(torch.int32) + remainder).view(torch.float32)
        sound = whole >= 0  # past zero and past infinity lie NaNs
    else:
        small = magnitude < _SMALLEST_NORMAL
        near = torch.where(small, magnitude + _SMALLEST_NORMAL, magnitude)
        whole = (near.view(torch.int32) + remainder).view(torch.float32)
        whole = torch.where(small, whole - _SMALLEST_NORMAL, whole)
        sound = (whole >= 0) & torch.isfinite(wide)
    return torch.where(sound, torch.copysign(whole, wide), wide)


def settle(difference: Tensor, a: Tensor, b: Tensor, bits: Tensor) -> Tensor:
    """`difference`, the float32 `a - b`, or its neighbour, so that the mean is the exact `a - b`.

    The part that float32 cuts off, such as a decay of 1e-8, would be lost before the rounding to 16
    bits. The lower 16 bits of `bits` (int32) decide; rounding to 16 bits uses the upper ones.
    """
    back = difference - a
    rest = (a - (difference - back)).sub_(back.add_(b))  # exact (Knuth, "The Art ...", 2, 4.2.2)
    word = difference.view(torch.int32)
    # -1 or 1: of unlike signs the magnitude shrinks. The next pattern is the next number in size
    by = (rest.view(torch.int32) ^ word).bitwise_right_shift_(31).bitwise_or_(1)
    # The middles of 2^16 equal parts of 0 to 1: no bias, and never 0 or 1
    drawn = (bits & 0xFFFF).float().mul_(2.0**-16).add_(2.0**-17)
    drawn.mul_((word + by).view(torch.float32).sub_(difference).abs_())
    return by.mul_(rest.abs_().gt_(drawn).int()).add_(word).view(torch.float32)  # `where` is slow


# The dtypes as the kernels name them
C_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Elements that PyTorch works on at a time without a compiler: a few such blocks fit a cache
EAGER_BLOCK = 2**16
SERIAL = 2**15  # Elements below which starting threads costs more than they save


def threads_for(count: int) -> int:
    """Threads that a compiled kernel gets for `count` elements."""
    return 1 if count < SERIAL else torch.get_num_threads()


def stochastic(
    x: Tensor, dtype: torch.dtype, key: Key, overflow: str = "infinity", start: int = 0
) -> Tensor:
    """`x` (float32) stochastically rounded with the bits of `key`; the same bits on every path.

    `start` is the index of the first element in the whole tensor, where `x` is a shard.

    Returns:
        The rounded numbers, in the layout of `x` where it is dense; elements are counted as they
        lie in memory.
    """
    # With its dimensions in the order of its strides a dense tensor, however permuted, is flat.
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    x = x.permute(order).contiguous()
    rounded = torch.empty_like(x, dtype=dtype)
    flat, out = x.view(-1), rounded.view(-1)
    in_c = x.device.type == "cpu" and kernels.why_not() is None
    for begin, end, block, first in spans(start, flat.numel()):
        part, to, own = flat[begin:end], out[begin:end], key.at(block)
        if in_c:
            _in_c(part, to, None, own, overflow, first)
        else:
            _eagerly(part, to, own, overflow, first)
    return rounded.permute([order.index(d) for d in range(len(order))])


def round_twice(
    x: Tensor, dtype: torch.dtype, key: Key | None, overflow: str, wide: Tensor
) -> Tensor | None:
    """`x` rounded to `dtype`; the same numbers are written to `wide`, which may be `x` itself.

    Both are float32 on the CPU, dense and of one layout, with at most 2^31 numbers; `key` None
    rounds to nearest.

    Returns:
        The rounded numbers in the layout of `x`, with the bits of `stochastic` or `round_nearest`;
        None where there are no kernels, and `wide` is unchanged.
    """
    if kernels.why_not() is not None:
        return None
    rounded = torch.empty_like(x, dtype=dtype)
    _in_c(x, rounded, wide, key, overflow)
    return rounded


def _in_c(
    x: Tensor, to: Tensor, wide: Tensor | None, key: Key | None, overflow: str, first: int = 0
) -> None:
    words = None if key is None else (ctypes.c_uint32 * 2)(*key)
    pointers = [None if y is None else y.data_ptr() for y in (x, to, wide)]
    how = kernels.FORMATS.index(C_TYPES[to.dtype]), overflow == "saturate", threads_for(x.numel())
    kernels.call("round", *pointers, x.numel(), first, words, *how)


def _eagerly(x: Tensor, out: Tensor, key: Key, overflow: str, first: int) -> None:
    block = EAGER_BLOCK if x.device.type == "cpu" else x.numel()
    for start in range(0, x.numel(), block):
        part = x[start : start + block]
        bits = random_bits(key, part.numel(), x.device, first + start)
        out[start : start + block] = round_stochastic(part, out.dtype, bits, overflow)


# Bits of a master beside its parameter. In steps of 2^8 (bfloat16) or 2^5 (float16) the remainder
# is -128 to 127, since ties go away from zero.
REST_BITS = 8
CUT = {torch.bfloat16: 16, torch.float16: 13}  # Bits of the integer below the parameter
INFINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # The parameter's infinity
# The float32 word without its sign; the sign of 16 bits, as an int16 that is negative
_MAGNITUDE, _SIGN_BIT = 0x7FFFFFFF, -0x8000
_NORMAL = 0x38800000  # The float32 word of 2^-14, float16's smallest normal number
_BINADE = 2**23  # Float32 patterns from a power of two to the next one


def split_master(x: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """`x` (float32) as a master of 24 bits: the parameter in `dtype`, and int8 beside it.

    The upper 8 (bfloat16) or 5 of `bits` (int32) are used; None rounds the master to nearest. Where
    a finite number rounds to infinity the 8 bits are 0, and it stays an infinity.
    """
    unit = CUT[dtype] - REST_BITS
    # Half of a unit rounds to nearest, ties away from zero; random bits below a unit stochastically
    drawn = 1 << (unit - 1) if bits is None else shift_right(bits, 32 - unit)
    # Stochastically, because an update below half of a unit would be lost to nearest.
    master = (_integer(x, dtype) + drawn) >> unit  # of 24 bits with the sign
    parameter = (master + (1 << (REST_BITS - 1))) >> REST_BITS
    rest = master - (parameter << REST_BITS)
    # The parameter may become infinite by its own rounding, too
    finite = torch.isfinite(x) & (parameter < INFINITE[dtype])
    parameter = torch.where(finite, parameter, INFINITE[dtype])
    # All bits set is a NaN in both formats
    parameter = torch.where(x.isnan(), 0x7FFF, parameter)
    # The integer is that of the magnitude; in 16 bits the sign is bit 15
    sign = (x.view(torch.int32) >> 16) & _SIGN_BIT
    rounded = (parameter | sign).to(torch.int16).view(dtype)
    return rounded, torch.where(finite, rest, 0).to(torch.int8)


def merge_master(parameter: Tensor, rest: Tensor) -> Tensor:
    """The masters that `split_master` took apart, in float32.

    If other code has written the parameter since, the 8 bits belong to another number. They then
    move it by at most half the distance to its neighbour, and not past zero.
    """
    dtype, wide = parameter.dtype, parameter.float()
    unit = CUT[dtype] - REST_BITS
    own = parameter.view(torch.int16).int() & 0x7FFF
    master = (own << CUT[dtype]) + (rest.int() << unit)
    whole = torch.copysign(_number(master, dtype), wide)
    # An infinity has no remainder, and one that belongs to another number may lead past zero
    return torch.where((own < INFINITE[dtype]) & (master >= 0), whole, wide)


def rest_beside(x: Tensor, parameter: Tensor) -> Tensor:
    """The 8 bits that bring `parameter` as close to `x` (float32) as they can."""
    dtype = parameter.dtype
    unit = CUT[dtype] - REST_BITS
    own = parameter.view(torch.int16).int() & 0x7FFF
    master = (_integer(x, dtype) + (1 << (unit - 1))) >> unit
    # Kahan's remainder just below half of a step rounds to 128 units, one more than int8 holds
    rest = (master - (own << REST_BITS)).clamp(-128, 127)
    return torch.where(own < INFINITE[dtype], rest, 0).to(torch.int8)


def merged(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers of parameters and their remainders: Kahan's (int16), or 8 bits (int8)."""
    whole = merge_master if remainder.dtype == torch.int8 else merge
    return whole(parameter, remainder)


def converted(parameter: Tensor, remainder: Tensor, dtype: torch.dtype) -> Tensor:
    """A remainder of one kind as one of the other: int16 or int8."""
    if remainder.dtype == dtype:
        return remainder
    whole = merged(parameter, remainder)
    if dtype == torch.int8:
        return rest_beside(whole, parameter)
    return _rest(whole, parameter.float(), parameter.dtype)


def _integer(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The integer that grows with the number, whose upper bits are the parameter; int32."""
    word = x.view(torch.int32) & _MAGNITUDE
    if dtype == torch.bfloat16:
        return word
    # Subnormals of float16: see `_rest`. Others get float16's exponent, where 2^-14 has 1.
    low = (x.abs() + 2.0**-14).view(torch.int32) - _NORMAL
    return torch.where(word < _NORMAL, low, word - (_NORMAL - _BINADE))


def _number(integer: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of an integer of `_integer`, without its sign."""
    if dtype == torch.bfloat16:
        return integer.view(torch.float32)
    low = (integer + _NORMAL).view(torch.float32) - 2.0**-14
    high = (integer + (_NORMAL - _BINADE)).view(torch.float32)
    return torch.where(integer < _BINADE, low, high)


def sqnr_db(exact: Tensor, low: Tensor) -> float:
    """The size of rounding errors: their SQNR, in dB; computed in float64.

    10 log10(sum of squares of the exact values / sum of squares of the differences). Large elements
    count most, as they do in every sum over the tensor.

    Infinite if they are equal, minus infinity if only the exact one is zero, NaN if a value of
    either is not finite.
    """
    exact, low = exact.double(), low.double()
    return sums_db(exact.square().sum().item(), (low - exact).square().sum().item())


def sums_db(signal: float, noise: float) -> float:
    """The ratio of two sums of squares, which may be over several tensors, in dB."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    return ratio_db(signal, noise)


def ratio_db(signal: float, noise: float) -> float:
    """The ratio of two powers in dB; inf without noise, -inf without signal or with all noise."""
    if noise == 0:
        return math.inf
    if signal == 0 or math.isinf(noise):
        return -math.inf
    # A difference of logarithms: the quotient of a tiny signal and a huge noise may be 0.
    # Each bit of precision is worth 6.02 dB (Bennett, "Spectra of Quantized Signals", 1948).
    return 10 * (math.log10(signal) - math.log10(noise))
