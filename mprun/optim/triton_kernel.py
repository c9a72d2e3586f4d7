"""The optimizer step of a list of tensors as one Triton kernel.

Each program updates `CHUNK` numbers of one tensor: it looks up which in a table of addresses, so
the number of launches does not depend on that of the tensors. The operations are those of
`precision/kernels` (formats.h and steps.h explain them), in the same order, on words of 32 bits.
Fused multiply-adds are switched off, and division and root are rounded correctly, so the bits are
those of the other engines. Triton keeps what it compiled on disk (`TRITON_CACHE_DIR`).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from mprun.optim.formulas import HYPERS, PER_SCALE
from mprun.precision.kernels import CHUNK, COLUMNS

_COLUMNS, _HYPERS = tl.constexpr(COLUMNS), tl.constexpr(HYPERS)
_CHUNK, _GROUP = tl.constexpr(CHUNK), tl.constexpr(PER_SCALE)
_MAGNITUDE, _INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
_QUANTUM = tl.constexpr(0x38800000)  # 2^-14, float16's smallest normal number
_REBIAS = tl.constexpr(112 << 23)  # Between the exponents of float32 and float16


def update(chunks: int, *tensors: Tensor, **storage: str | bool) -> None:
    """Update the numbers of `chunks`; the arguments are those of `_step`."""
    device = tensors[0].device
    # Triton launches on the current device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _step[(chunks,)](*tensors, **storage, enable_fp_fusion=False)


@triton.jit
def _pattern(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _number(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mixed(state, part):
    state = (state ^ part) + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _draw(state, number, block, site, index):
    """Random bits of the elements `index` of a result: see `random_bits`."""
    key = _mixed(_mixed(state, number), site)
    further = _mixed(_mixed(_mixed(key * 0, key & 0xFFFFFFFF), key >> 32), block)
    key = tl.where(block == 0, key, further)
    word = (index ^ key.to(tl.uint32)) * 0xED5AD4BB
    word = word ^ (word >> 11)
    word = (word ^ (key >> 32).to(tl.uint32)) * 0xAC4C1B51
    word = (word ^ (word >> 15)) * 0x31848BAB
    return word ^ (word >> 14)


@triton.jit
def _settle(difference, a, b, word):
    back = difference - a
    rest = (a - (difference - back)) - (b + back)
    bits = _pattern(difference)
    neighbour = tl.where((_pattern(rest) ^ bits) >> 31 != 0, bits - 1, bits + 1)
    gap = tl.abs(_number(neighbour) - difference)
    drawn = _number(0x3F800040 | ((word << 7) & 0x7FFF80)) - 1.0
    return _number(tl.where(tl.abs(rest) > drawn * gap, neighbour, bits))


# ---- bfloat16 and float16, as the lower halves of words ----


@triton.jit
def _finished(bits, rounded, top, infinite):
    """With its sign; an overflow becomes `top`, an infinity `infinite`."""
    magnitude = bits & _MAGNITUDE
    rounded = tl.where((rounded >= top) & (magnitude < _INFINITE), top, rounded)
    rounded = tl.where(magnitude == _INFINITE, infinite, rounded)
    rounded = tl.where(magnitude > _INFINITE, 0x7FFF, rounded)  # a NaN in both formats
    return rounded | ((bits >> 16) & 0x8000)


@triton.jit
def _to_bf16(x, add, SATURATE: tl.constexpr):
    """With random bits to add below the format's last, or what rounds to nearest."""
    bits = _pattern(x)
    return _finished(
        bits, ((bits & _MAGNITUDE) + add) >> 16, 0x7F7F if SATURATE else 0x7F80, 0x7F80
    )


@triton.jit
def _nearest_bf16(x, SATURATE: tl.constexpr):
    return _to_bf16(x, 0x7FFF + ((_pattern(x) >> 16) & 1), SATURATE)


@triton.jit
def _from_f16(word):
    magnitude = (word & 0x7FFF) << 13
    normal = magnitude + _REBIAS + tl.where(magnitude >= (31 << 23), _REBIAS, 0)
    small = _pattern((word & 0x3FF).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08)  # 2^-24
    return _number(tl.where(magnitude < (1 << 23), small, normal) | ((word & 0x8000) << 16))


@triton.jit
def _nearest_f16(x, SATURATE: tl.constexpr):
    bits = _pattern(x)
    magnitude = bits & _MAGNITUDE
    small = _pattern(_number(magnitude) + 0.5) - 0x3F000000
    normal = (magnitude - _REBIAS + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    rounded = tl.where(magnitude < _QUANTUM, small, normal)
    return _finished(bits, rounded, 0x7BFF if SATURATE else 0x7C00, 0x7C00)


@triton.jit
def _drawn_f16(x, word, SATURATE: tl.constexpr):
    bits = _pattern(x)
    magnitude = bits & _MAGNITUDE
    shift = _number(tl.where(magnitude < _QUANTUM, _QUANTUM, 0).to(tl.uint32))
    y = (_pattern(_number(magnitude) + shift) + (word >> 19)) & 0xFFFFE000
    y = _pattern(_number(y) - shift)
    y = tl.where(magnitude < _INFINITE, y, magnitude)
    return _nearest_f16(_number(y | (bits & 0x80000000)), SATURATE)


@triton.jit
def _rounded(x, word, DRAWN: tl.constexpr, FORMAT: tl.constexpr, SATURATE: tl.constexpr):
    """float32 as words of 16 bits."""
    if FORMAT == "BF16":
        if DRAWN:
            return _to_bf16(x, word >> 16, SATURATE)
        return _nearest_bf16(x, SATURATE)
    y = x * 64.0 if FORMAT == "S16" else x
    if DRAWN:
        return _drawn_f16(y, word, SATURATE or FORMAT == "S16")
    return _nearest_f16(y, SATURATE or FORMAT == "S16")


@triton.jit
def _widened(word, FORMAT: tl.constexpr):
    if FORMAT == "BF16":
        return _number(word << 16)
    if FORMAT == "S16":
        return _from_f16(word) * 0.015625
    return _from_f16(word)


# ---- remainders beside parameters: precision/rounding.py ----


@triton.jit
def _integer(x, FORMAT: tl.constexpr):
    magnitude = _pattern(x) & _MAGNITUDE
    if FORMAT == "BF16":
        return magnitude
    low = _pattern(_number(magnitude) + 6.103515625e-05) - _QUANTUM
    return tl.where(magnitude < _QUANTUM, low, magnitude - (_QUANTUM - 0x800000))


@triton.jit
def _of_integer(integer, FORMAT: tl.constexpr):
    if FORMAT == "BF16":
        return integer
    low = _pattern(_number(integer + _QUANTUM) - 6.103515625e-05)
    return tl.where(integer < 0x800000, low, integer + (_QUANTUM - 0x800000))


@triton.jit
def _merged_master(word, rest, FORMAT: tl.constexpr):
    cut: tl.constexpr = 16 if FORMAT == "BF16" else 13
    own = word & 0x7FFF
    master = ((own << cut).to(tl.int32) + rest * (1 << (cut - 8))).to(tl.uint32)
    is_sound = (own < (0x7F80 if FORMAT == "BF16" else 0x7C00)) & (master >> 31 == 0)
    wide = _widened(word, FORMAT)
    whole = _of_integer(master, FORMAT) | (_pattern(wide) & 0x80000000)
    return tl.where(is_sound, _number(whole), wide)


@triton.jit
def _split_master(x, word, FORMAT: tl.constexpr):
    unit: tl.constexpr = 8 if FORMAT == "BF16" else 5
    top: tl.constexpr = 0x7F80 if FORMAT == "BF16" else 0x7C00
    bits = _pattern(x)
    master = (_integer(x, FORMAT) + (word >> (32 - unit))) >> unit
    parameter = (master + 0x80) >> 8
    is_finite = ((bits & _MAGNITUDE) < _INFINITE) & (parameter < top)
    rest = tl.where(is_finite, master - (parameter << 8), 0)
    parameter = tl.where(is_finite, parameter, top)
    parameter = tl.where((bits & _MAGNITUDE) > _INFINITE, 0x7FFF, parameter)
    return parameter | ((bits >> 16) & 0x8000), rest


@triton.jit
def _merged_kahan(word, rest, FORMAT: tl.constexpr):
    wide = _widened(word, FORMAT)
    bits = _pattern(wide)
    magnitude = bits & _MAGNITUDE
    add = rest.to(tl.uint32)
    if FORMAT == "BF16":
        whole = magnitude + add
        whole = tl.where(whole > _INFINITE, magnitude, whole)
    else:
        low = _pattern(
            _number(_pattern(_number(magnitude) + 6.103515625e-05) + add) - 6.103515625e-05
        )
        whole = tl.where(magnitude < _QUANTUM, low, magnitude + add)
        whole = tl.where((whole > _INFINITE) | (magnitude >= _INFINITE), magnitude, whole)
    return _number(whole | (bits & 0x80000000))


@triton.jit
def _split_kahan(x, FORMAT: tl.constexpr):
    bits = _pattern(x)
    magnitude = bits & _MAGNITUDE
    if FORMAT == "BF16":
        is_finite = magnitude < _INFINITE
        rounded = (magnitude + tl.where(is_finite, 0x8000, 0).to(tl.uint32)) >> 16
        rest = tl.where(is_finite, (magnitude - (rounded << 16)) & 0xFFFF, 0)
        rounded = tl.where(magnitude > _INFINITE, 0x7FC0, rounded) | ((bits >> 16) & 0x8000)
    else:
        rounded = _nearest_f16(x, False)
        wide = _pattern(_from_f16(rounded)) & _MAGNITUDE
        low = _pattern(_number(magnitude) + 6.103515625e-05) - _pattern(
            _number(wide) + 6.103515625e-05
        )
        difference = tl.where(wide < _QUANTUM, low, magnitude - wide)
        rest = tl.where(wide < _INFINITE, difference & 0xFFFF, 0)
    return rounded, rest


# ---- memory ----


@triton.jit
def _load(address, at, mask, FORMAT: tl.constexpr):
    if FORMAT == "F32":
        return tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
    words = tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask=mask, other=0)
    return _widened(words.to(tl.uint32), FORMAT)


@triton.jit
def _loaded_moment(address, scales, map, at, mask, FORMAT: tl.constexpr):
    if FORMAT == "NONE":
        return tl.full([_CHUNK], 0.0, tl.float32)
    if FORMAT == "C8":
        codes = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=mask, other=0)
        groups = scales.to(tl.pointer_type(tl.float32)) + at // _GROUP
        return tl.load(map + codes.to(tl.int32)) * tl.load(groups, mask=mask, other=0.0)
    return _load(address, at, mask, FORMAT)


@triton.jit
def _store_words(address, at, words, mask):
    tl.store(address.to(tl.pointer_type(tl.uint16)) + at, words.to(tl.uint16), mask=mask)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _store_moment(
    address,
    scales,
    map,
    at,
    x,
    word,
    mask,
    inside,
    DRAWN: tl.constexpr,
    ROOT: tl.constexpr,
    FORMAT: tl.constexpr,
    SATURATE: tl.constexpr,
):
    if FORMAT == "F32":
        tl.store(address.to(tl.pointer_type(tl.float32)) + at, x, mask=mask)
    elif FORMAT == "C8":
        # Codes and scales: `formulas.encode`
        bits = tl.where(inside, _pattern(x), 0).to(tl.uint32)
        magnitude = bits & _MAGNITUDE
        groups: tl.constexpr = _CHUNK // _GROUP
        largest = tl.reduce(tl.reshape(magnitude, [groups, _GROUP]), 1, _larger)
        above = tl.where(bits >> 31 == 0, magnitude, 0).to(tl.uint32)
        positive = tl.reduce(tl.reshape(above, [groups, _GROUP]), 1, _larger)
        size = tl.where(largest > positive, largest | 0x80000000, largest)
        size = _number(tl.where(largest >= _INFINITE, 0x7FC00000, size).to(tl.uint32))
        wide = tl.reshape(tl.broadcast_to(size[:, None], [groups, _GROUP]), [_CHUNK])
        ratio = tl.div_rn(x, wide)
        ratio = tl.where(ratio == ratio, ratio, 0.0)
        code = tl.full([_CHUNK], 0, tl.int32)
        for power in tl.static_range(7, -1, -1):
            further = code + (1 << power)
            code = tl.where(ratio >= tl.load(map + further), further, code)
        low = tl.load(map + code)
        gap = tl.load(map + tl.minimum(code + 1, 255)) - low
        if DRAWN:
            drawn = (word >> 16).to(tl.int32).to(tl.float32) * 1.52587890625e-05 + 7.62939453125e-06
            up = ratio - low > drawn * gap
        else:
            up = ratio - low >= gap * 0.5
        code = tl.where(up & (code < 255), code + 1, code)
        if ROOT:  # a positive one never becomes 0
            code = tl.where(ratio > 0.0, tl.maximum(code, 1), code)
        tl.store(address.to(tl.pointer_type(tl.uint8)) + at, code.to(tl.uint8), mask=mask)
        # All numbers of a group write its scale, which is the same
        tl.store(scales.to(tl.pointer_type(tl.float32)) + at // _GROUP, wide, mask=mask)
    elif FORMAT != "NONE":
        _store_words(address, at, _rounded(x, word, DRAWN, FORMAT, SATURATE), mask)


# ---- the step ----


@triton.jit
def _changed(h, w, g, m, v, FORMULA: tl.constexpr):
    """What is subtracted from the parameter, and the new moments: `optimizers.py`."""
    h1, h2, h3, h4 = tl.load(h + 1), tl.load(h + 2), tl.load(h + 3), tl.load(h + 4)
    h5, h6, h7, h8 = tl.load(h + 5), tl.load(h + 6), tl.load(h + 7), tl.load(h + 8)
    if FORMULA == "adamw":
        m = m * h1 + g * h2
        v = v * h3 + (g * g) * h4
        is_finite = (_pattern(w) & _MAGNITUDE) < _INFINITE
        decay = tl.where(is_finite, w * h5, 0.0)
        change = decay + h6 * tl.div_rn(m, tl.sqrt_rn(v) * h7 + h8)
    elif FORMULA == "sgd":
        m = m * h2 + (g + w * h1) * h4
        change = h3 * m
    elif FORMULA == "nesterov":
        x = g + w * h1
        m = m * h2 + x
        change = h3 * (x + m * h2)
    else:
        x = g + w * h1
        v = v * h2 + (x * x) * h3
        m = m * h4 + tl.div_rn(x, tl.sqrt_rn(v) + h5)
        change = h6 * m
    return change, m, v


@triton.jit
def _step(
    table,
    chunks,
    words,
    hypers,
    skip,
    maps,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    FORMULA: tl.constexpr,
    RULE: tl.constexpr,
    FIRST_DRAWN: tl.constexpr,
    ROOT: tl.constexpr,
    SATURATE: tl.constexpr,
    SKIPS: tl.constexpr,
):
    chunk = chunks + 2 * tl.program_id(0)
    row = table + tl.load(chunk) * _COLUMNS
    at = tl.load(chunk + 1) * _CHUNK + tl.arange(0, _CHUNK)
    inside = at < tl.load(row + 6)
    tensor = tl.load(row + 7)
    h = hypers + tensor * _HYPERS
    number, block = tl.load(row + 9).to(tl.uint64), tl.load(row + 10).to(tl.uint64)
    index = (tl.load(row + 11) + at).to(tl.uint32)
    state = tl.load(words + 2 * tensor + 1).to(tl.uint64)
    param, first, second, rests = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    first_scales, second_scales = tl.load(row + 4), tl.load(row + 5)

    stored = param.to(tl.pointer_type(tl.uint16)) + at
    if RULE == "kahan":
        rest = tl.load(rests.to(tl.pointer_type(tl.int16)) + at, mask=inside, other=0).to(tl.int32)
        old = _merged_kahan(tl.load(stored, mask=inside, other=0).to(tl.uint32), rest, PARAM)
    elif RULE == "split":
        rest = tl.load(rests.to(tl.pointer_type(tl.int8)) + at, mask=inside, other=0).to(tl.int32)
        old = _merged_master(tl.load(stored, mask=inside, other=0).to(tl.uint32), rest, PARAM)
    else:
        old = _load(param, at, inside, PARAM)
    g = _load(tl.load(words + 2 * tensor), tl.load(row + 8) + at, inside, GRAD) * tl.load(h)
    m = _loaded_moment(first, first_scales, maps, at, inside, FIRST)
    v = _loaded_moment(second, second_scales, maps + 256, at, inside, SECOND)
    v = v * v if ROOT else v
    change, m, v = _changed(h, old, g, m, v, FORMULA)
    v = tl.sqrt_rn(v) if ROOT else v
    new = old - change

    mask = inside
    if SKIPS:
        mask = inside & (tl.load(skip) == 0.0)
    word = index
    if RULE == "stochastic" or RULE == "split":
        word = _draw(state, number, block, 0, index)
        new = _settle(new, old, change, word)
    if RULE == "kahan":
        rounded, rest = _split_kahan(new, PARAM)
        _store_words(param, at, rounded, mask)
        tl.store(rests.to(tl.pointer_type(tl.int16)) + at, rest.to(tl.int16), mask=mask)
    elif RULE == "split":
        rounded, rest = _split_master(new, word, PARAM)
        _store_words(param, at, rounded, mask)
        tl.store(rests.to(tl.pointer_type(tl.int8)) + at, rest.to(tl.int8), mask=mask)
    elif PARAM == "F32":
        tl.store(param.to(tl.pointer_type(tl.float32)) + at, new, mask=mask)
    else:
        _store_words(param, at, _rounded(new, word, RULE == "stochastic", PARAM, SATURATE), mask)
    word = _draw(state, number, block, 1, index)
    _store_moment(
        first, first_scales, maps, at, m, word, mask, inside, FIRST_DRAWN, False, FIRST, SATURATE
    )
    word = _draw(state, number, block, 2, index)
    _store_moment(
        second, second_scales, maps + 256, at, v, word, mask, inside, True, True, SECOND, SATURATE
    )
