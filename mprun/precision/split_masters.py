"""Masters of 24 bits: a 16-bit parameter, and 8 more bits beside it.

Kahan's remainder (`rounding.split`) has 16 bits, so that parameter and remainder are a float32
number: 4 bytes. Most of what it saves is in the upper bits. With 8 of them, 3 bytes, the master's
neighbours are 2^-15 (bfloat16) or 2^-18 (float16) of its size apart, 256 times closer than the
parameter's. An update that is still smaller would be lost by rounding to nearest, so the master is
rounded *stochastically*, and the parameter is the master rounded to nearest:

    float32 result -> master of 24 bits (stochastic) -> parameter (nearest) and 8 bits

Both 16-bit formats are the upper bits of an integer that grows with the number:

    bfloat16   the bits of |x| in float32; the 16 upper ones of 32 are the number
    float16    those bits with the exponent of float16, subnormals moved up by 2^-14 (as in
               `rounding`), so that neighbours are 2^13 apart everywhere

So a master is this integer without its lowest bits, and the remainder is the difference to the
parameter's, in steps of 2^8 (bfloat16) or 2^5 (float16): -128 to 127, since ties go away from zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mprun.precision import rounding
from mprun.precision.random_bits import shift_right

REST_BITS = 8
CUT = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of the integer below the parameter."""
INFINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""The parameter's infinity."""
_MAGNITUDE, _SIGN = 0x7FFFFFFF, -0x8000
_NORMAL = 0x38800000
"""The float32 word of 2^-14, float16's smallest normal number."""
_BINADE = 2**23


def split_master(x: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """`x` as a master of 24 bits: the parameter, and the 8 bits beside it.

    Args:
        x: float32, any shape.
        dtype: float16 or bfloat16.
        bits: int32 of that shape, random bits of which the upper 8 (bfloat16) or 5 are used; None
            rounds the master to nearest.

    Returns:
        The parameters in `dtype`, and int8 of that shape. Where a finite number rounds to infinity
        the 8 bits are 0, and it stays an infinity.
    """
    unit = CUT[dtype] - REST_BITS
    drawn = 1 << (unit - 1) if bits is None else shift_right(bits, 32 - unit)
    master = (_integer(x, dtype) + drawn) >> unit  # of 24 bits with the sign
    parameter = (master + (1 << (REST_BITS - 1))) >> REST_BITS
    rest = master - (parameter << REST_BITS)
    finite = torch.isfinite(x) & (parameter < INFINITE[dtype])
    parameter = torch.where(finite, parameter, INFINITE[dtype])
    parameter = torch.where(x.isnan(), 0x7FFF, parameter)
    sign = (x.view(torch.int32) >> 16) & _SIGN
    rounded = (parameter | sign).to(torch.int16).view(dtype)
    return rounded, torch.where(finite, rest, 0).to(torch.int8)


def merge_master(parameter: Tensor, rest: Tensor) -> Tensor:
    """The masters that `split_master` took apart, in float32.

    If other code has written the parameter since, the 8 bits belong to another number. They then
    move it by at most half the distance to its neighbour, and not past zero.

    Args:
        parameter: float16 or bfloat16, any shape.
        rest: int8 of that shape.
    """
    dtype, wide = parameter.dtype, parameter.float()
    unit = CUT[dtype] - REST_BITS
    own = parameter.view(torch.int16).int() & 0x7FFF
    master = (own << CUT[dtype]) + (rest.int() << unit)
    whole = torch.copysign(_number(master, dtype), wide)
    return torch.where((own < INFINITE[dtype]) & (master >= 0), whole, wide)


def rest_beside(x: Tensor, parameter: Tensor) -> Tensor:
    """The 8 bits that bring `parameter` as close to `x` (float32) as they can."""
    dtype = parameter.dtype
    unit = CUT[dtype] - REST_BITS
    own = parameter.view(torch.int16).int() & 0x7FFF
    master = (_integer(x, dtype) + (1 << (unit - 1))) >> unit
    rest = (master - (own << REST_BITS)).clamp(-128, 127)
    return torch.where(own < INFINITE[dtype], rest, 0).to(torch.int8)


def merged(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers of parameters and their remainders: Kahan's (int16), or 8 bits (int8)."""
    merge = merge_master if remainder.dtype == torch.int8 else rounding.merge
    return merge(parameter, remainder)


def converted(parameter: Tensor, remainder: Tensor, dtype: torch.dtype) -> Tensor:
    """A remainder of one kind as one of the other: int16 or int8."""
    if remainder.dtype == dtype:
        return remainder
    beside = rest_beside if dtype == torch.int8 else rounding.kahan_rest
    return beside(merged(parameter, remainder), parameter)


def _integer(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The integer whose upper bits are the parameter; int32."""
    word = x.view(torch.int32) & _MAGNITUDE
    if dtype == torch.bfloat16:
        return word
    low = (x.abs() + 2.0**-14).view(torch.int32) - _NORMAL
    return torch.where(word < _NORMAL, low, word - (_NORMAL - _BINADE))


def _number(integer: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of an integer of `_integer`, without its sign."""
    if dtype == torch.bfloat16:
        return integer.view(torch.float32)
    low = (integer + _NORMAL).view(torch.float32) - 2.0**-14
    high = (integer + (_NORMAL - _BINADE)).view(torch.float32)
    return torch.where(integer < _BINADE, low, high)
