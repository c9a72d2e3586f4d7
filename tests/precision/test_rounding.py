"""Rounding to 16 bits, by enumeration: every random-bit pattern, counted against exact arithmetic.

The oracle knows no bit patterns: in float64 the numbers of a dtype around x are the multiples of
its spacing there, and every quotient and difference formed below is exact (powers of two, 24 bits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from mprun.precision.rounding import (
    DTYPES,
    OVERFLOWS,
    merge,
    round_nearest,
    round_stochastic,
    split,
)
from tests.each import each

MANTISSA = {torch.float16: 10, torch.bfloat16: 7}
SMALLEST_EXPONENT = {torch.float16: -14, torch.bfloat16: -126}
OVERFLOW = {torch.float16: 2.0**16, torch.bfloat16: 2.0**128}
"""The number after the largest finite one, were there one more exponent."""
DROPPED = {torch.float16: 13, torch.bfloat16: 16}
"""The bits of a float32's mantissa that a normal number of the dtype does not have."""

SIXTEEN = each("dtype", DTYPES, ids=str)
ANY_PATTERN = st.integers(min_value=0, max_value=2**32 - 1)


def floats(patterns: Tensor | list[int]) -> Tensor:
    """The float32 numbers with these bits (of any integer type; the lower 32 count)."""
    wide = torch.as_tensor(patterns, dtype=torch.int64) & 0xFFFFFFFF
    return (wide - ((wide >> 31) << 32)).to(torch.int32).view(torch.float32)


def words(patterns: Tensor | list[int]) -> Tensor:
    return floats(patterns).view(torch.int32)


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def random_patterns(count: int, seed: int = 0) -> Tensor:
    """float32 numbers of all kinds: every pattern is as likely as any other."""
    return floats(torch.randint(2**32, (count,), generator=torch.Generator().manual_seed(seed)))


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of the dtype's numbers around `x` (float64, finite)."""
    exponent = torch.frexp(x).exponent - 1
    exponent = exponent.clamp(min=SMALLEST_EXPONENT[dtype]) - MANTISSA[dtype]
    return torch.ldexp(torch.ones_like(x), exponent)


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Magnitudes below (or at) and above finite `x`, and where between them it lies, in float64."""
    magnitude = x.double().abs()
    unit = spacing(magnitude, dtype)
    below = torch.floor(magnitude / unit) * unit
    above = below + unit
    above = torch.where(above >= OVERFLOW[dtype], torch.inf, above)
    below = torch.where(below >= OVERFLOW[dtype], torch.inf, below)
    return below, above, magnitude / unit - torch.floor(magnitude / unit)


def exact_nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite `x` to the nearest number of the dtype, ties to even, in float64 (signs too)."""
    unit = spacing(x.double(), dtype)
    rounded = torch.round(x.double() / unit) * unit  # torch.round takes ties to even
    return torch.where(rounded.abs() >= OVERFLOW[dtype], rounded * torch.inf, rounded)


def every_word(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """All patterns of the bits that are used, each above other random bits that are not."""
    unused = 32 - DROPPED[dtype]
    used = torch.arange(2 ** DROPPED[dtype], dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    return words((used << unused) | torch.randint(2**unused, used.shape, generator=generator))


def around(
    dtype: torch.dtype, exponents: Sequence[int], kept: tuple[int, ...], dropped: tuple[int, ...]
) -> Iterator[Tensor]:
    """For each float32 exponent field: all combinations of kept and dropped bits, both signs."""
    for exponent in exponents:
        yield floats(
            [
                (sign << 31) | (exponent << 23) | (k << DROPPED[dtype]) | d
                for sign in (0, 1)
                for k in kept
                for d in dropped
            ]
        )


def assert_exact_frequencies(x: Tensor, dtype: torch.dtype, every: Tensor) -> None:
    """Over all words, each x goes to its neighbours only, up as often as the exact share says."""
    below, above, share = neighbours(x, dtype)
    found = round_stochastic(
        x[:, None].expand(-1, len(every)).contiguous(),
        dtype,
        every.expand(len(x), -1).contiguous(),
    )
    assert torch.equal(found.signbit().all(1), x.signbit())
    assert torch.equal(found.signbit().any(1), x.signbit())
    # A number of the dtype has only itself: counted as "below", with a share of nought above.
    patterns = bits_of(found) & 0x7FFF
    ups = (patterns == bits_of(above.to(dtype))[:, None]).sum(1)
    downs = (patterns == bits_of(below.to(dtype))[:, None]).sum(1)
    assert torch.equal(downs + ups, torch.full_like(ups, len(every)))
    assert torch.equal(ups.double(), share * len(every))


# ---- round_stochastic: the frequencies ----


def test_float16_normals_round_up_as_often_as_the_exact_share() -> None:
    """Every exponent from 2^-14 to 2^15; exact numbers, their neighbours, halves, odd places."""
    every = every_word(torch.float16)
    for x in around(
        torch.float16,
        range(113, 143),
        kept=(0, 1, 0x155, 0x3FF),
        dropped=(0, 1, 0xFFF, 0x1000, 0x1001, 0x1234, 0x1FFF),
    ):
        assert_exact_frequencies(x, torch.float16, every)


@pytest.mark.parametrize(
    ("dropped", "exponents"),
    [
        ((0, 0x0F37, 0x7FFF, 0x8000, 0xFFFF), (0, 1, 100, 126, 127, 254)),
        *(
            pytest.param(dropped, range(255), marks=pytest.mark.exhaustive)
            for dropped in ((0, 1), (0x0F37,), (0x7FFF, 0x8000), (0x8001, 0xFFFF))
        ),
    ],
    ids=str,
)
def test_bfloat16_rounds_up_as_often_as_the_exact_share(
    dropped: tuple[int, ...], exponents: Sequence[int]
) -> None:
    """Exponents of float32, its subnormals (field 0) included, and across them, by carries."""
    every = every_word(torch.bfloat16)
    for x in around(torch.bfloat16, exponents, kept=(0, 0x2B, 0x7F), dropped=dropped):
        assert_exact_frequencies(x, torch.bfloat16, every)


def float16_subnormals() -> Tensor:
    """Below 2^-14: every exponent of float32, and the neighbourhoods of float16's subnormals."""
    exponents = torch.arange(113)
    mantissas = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x2AAAAA, 0x7FFFFF])
    tiny = floats(((exponents[:, None] << 23) | mantissas).view(-1))
    steps = torch.tensor([0, 1, 2, 3, 511, 512, 513, 1022, 1023], dtype=torch.float64) * 2**-24
    # Places between two subnormals: multiples of 2^-37, of half of it, and less.
    places = torch.tensor([0, 1, 2, 4095, 4096, 4097, 8190, 8191, 0.5, 1.5, 0.25, 0.75, 8191.75])
    near = (steps[:, None] + places.double() * 2**-37).view(-1).float()
    x = torch.cat([tiny, near[near < 2**-14]])
    return torch.cat([x, -x])


def test_float16_subnormals_are_unbiased_to_two_to_the_minus_38() -> None:
    every = every_word(torch.float16)
    exact = (float16_subnormals().double() * 2**37).frac() == 0
    assert 100 < int(exact.sum()) < len(exact) - 100  # numbers of both kinds are compared
    for x in float16_subnormals().split(64):
        below, above, _ = neighbours(x, torch.float16)
        found = round_stochastic(
            x[:, None].expand(-1, len(every)).contiguous(),
            torch.float16,
            every.expand(len(x), -1).contiguous(),
        )
        assert torch.equal(found.signbit(), x.signbit()[:, None].expand_as(found))
        magnitude = found.double().abs()
        assert ((magnitude == below[:, None]) | (magnitude == above[:, None])).all()
        # Sums of 2^13 multiples of 2^-24 below 2^-13, and their mean, are exact in float64.
        mean = magnitude.sum(1) / len(every)
        error = (mean - x.double().abs()).abs()
        assert (error <= 2.0**-38).all()
        exact = (x.double() * 2**37).frac() == 0
        assert (error[exact] == 0).all()


@given(pattern=ANY_PATTERN, word=ANY_PATTERN)
@example(pattern=0x477FF000, word=0xFFFFFFFF)
@example(pattern=0x387FFFFF, word=0x00000000)
def test_a_stochastic_rounding_is_a_neighbour_and_the_word_decides_in_order(
    pattern: int, word: int
) -> None:
    """Any number, any word: up if the word's used bits reach 1 - share, down otherwise."""
    x, bits = floats([pattern]), words([word])
    for dtype in DTYPES:
        found = round_stochastic(x, dtype, bits)
        if not x.isfinite().item():
            assert torch.equal(found.double(), x.double()) or bool(found.isnan() & x.isnan())
            continue
        below, above, share = neighbours(x, dtype)
        assert found.double().abs().item() in (below.item(), above.item())
        assert found.signbit().item() == x.signbit().item()
        if dtype == torch.bfloat16 or x.abs().item() >= 2.0**-14:
            used = Fraction(word >> (32 - DROPPED[dtype]), 2 ** DROPPED[dtype])
            up = used + Fraction(share.item()) >= 1
            expected = above if up else below
            assert found.double().abs().item() == expected.item()


@SIXTEEN
@each("overflow", OVERFLOWS)
def test_every_number_of_the_dtype_is_returned_as_it_is(dtype: torch.dtype, overflow: str) -> None:
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = exact[~exact.isnan()]
    for word in (0, 0x12345678, -1):
        bits = torch.full(exact.shape, word, dtype=torch.int32)
        found = round_stochastic(exact.float(), dtype, bits, overflow)
        assert torch.equal(bits_of(found), bits_of(exact))
    assert torch.equal(bits_of(round_nearest(exact.float(), dtype, overflow)), bits_of(exact))


# ---- special numbers and overflow ----

NANS = [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FA00000, 0x7FBFFFFF, 0x7F80FFFF, 0x7F801FFF]
NANS += [pattern | 0x80000000 for pattern in NANS]


@SIXTEEN
@each("overflow", OVERFLOWS)
def test_nan_of_any_payload_stays_nan_whatever_the_word(dtype: torch.dtype, overflow: str) -> None:
    every = every_word(dtype)
    for x in floats(NANS):
        assert round_stochastic(x.repeat(len(every)), dtype, every, overflow).isnan().all()
    assert round_nearest(floats(NANS), dtype, overflow).isnan().all()
    payloads = torch.arange(1, 2**23, 97)
    for sign in (0, 0x80000000):
        x = floats(0x7F800000 | sign | payloads)
        for word in (0, -1, 0x5A5A5A5A):
            bits = torch.full(x.shape, word, dtype=torch.int32)
            assert round_stochastic(x, dtype, bits, overflow).isnan().all()


@each(
    ("dtype", "number", "ups"),
    [
        *[
            (torch.float16, number, int((number - 65504) / 32 * 2**13))
            for number in (65504.0, 65504 + 2.0**-8, 65510.5, 65519.0, 65520.0, 65536 - 2.0**-8)
        ],
        (torch.float16, 65536.0, 2**13),
        (torch.float16, 65537.0, 2**13),
        (torch.float16, 2.0**100, 2**13),
        (torch.float16, torch.finfo(torch.float32).max, 2**13),
        *[
            (torch.bfloat16, floats([0x7F7F0000 + above]).item(), above)
            for above in (0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
        ],
    ],
)
@each("sign", [1, -1])
def test_overflow_is_as_likely_as_stated(
    dtype: torch.dtype, number: float, ups: int, sign: int
) -> None:
    """To infinity, or, saturating, to the largest number for the very same words: always."""
    every = every_word(dtype)
    x = torch.full(every.shape, sign * number)
    assert x[0].item() == sign * number  # the case is a float32
    largest = torch.finfo(dtype).max
    found = round_stochastic(x, dtype, every, "infinity")
    assert int((found == sign * torch.inf).sum()) == ups
    assert int((found == sign * largest).sum()) == len(every) - ups
    assert (round_stochastic(x, dtype, every, "saturate") == sign * largest).all()


@SIXTEEN
def test_saturating_changes_nothing_but_overflows(dtype: torch.dtype) -> None:
    x = random_patterns(300_000, seed=3)
    bits = words(torch.randint(2**32, x.shape, generator=torch.Generator().manual_seed(4)))
    for plain, saturated in (
        (round_nearest(x, dtype), round_nearest(x, dtype, "saturate")),
        (round_stochastic(x, dtype, bits), round_stochastic(x, dtype, bits, "saturate")),
    ):
        overflowed = plain.isinf() & x.isfinite()
        assert overflowed.any()
        largest = torch.finfo(dtype).max
        assert (saturated[overflowed] == torch.copysign(torch.tensor(largest), x)[overflowed]).all()
        rest = ~overflowed & ~x.isnan()
        assert torch.equal(bits_of(saturated)[rest], bits_of(plain)[rest])
        assert saturated[x.isnan()].isnan().all()


# ---- round_nearest ----


def float16_neighbourhoods() -> Tensor:
    """Every float16 number, the middle to the next one, and what lies one float32 beside it."""
    magnitudes = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    following = torch.cat([magnitudes[1:], torch.tensor([OVERFLOW[torch.float16]])])
    middle = ((magnitudes.double() + following.double()) / 2).float()
    pattern = middle.view(torch.int32)
    beside = [(pattern + by).view(torch.float32) for by in (-1, 1)]
    x = torch.cat([magnitudes, middle, *beside])
    return torch.cat([x, -x])


def bfloat16_neighbourhoods() -> Tensor:
    """The same of bfloat16; between its numbers lie 2^16 float32 patterns everywhere."""
    magnitudes = torch.arange(0x7F80, dtype=torch.int64) << 16
    x = floats(torch.cat([magnitudes + by for by in (0, 0x7FFF, 0x8000, 0x8001)]))
    return torch.cat([x, -x])


NEIGHBOURHOODS = {
    torch.float16: float16_neighbourhoods,
    torch.bfloat16: bfloat16_neighbourhoods,
}


@SIXTEEN
def test_nearest_is_torchs_cast_and_exact(dtype: torch.dtype) -> None:
    """Around every number of the dtype, and on random patterns."""
    x = torch.cat([NEIGHBOURHOODS[dtype](), random_patterns(1_000_000, seed=5)])
    found = round_nearest(x, dtype)
    assert torch.equal(bits_of(found), bits_of(x.to(dtype)))
    finite = x.isfinite()
    assert torch.equal(found[finite].double(), exact_nearest(x[finite], dtype))
    assert torch.equal(found.signbit()[finite], x.signbit()[finite])


# ---- split and merge ----


def edges(dtype: torch.dtype) -> Tensor:
    """Patterns at the ends of exponents, of the dtype's units and of its range; no NaN."""
    exponents = torch.arange(255)[:, None, None] << 23
    kept = torch.tensor([0, 1, 2 ** MANTISSA[dtype] - 1])[:, None] << DROPPED[dtype]
    half = 2 ** (DROPPED[dtype] - 1)
    dropped = torch.tensor([0, 1, half - 1, half, half + 1, 2 * half - 1])
    magnitudes = floats((exponents | kept | dropped).reshape(-1))
    x = torch.cat([magnitudes, float16_subnormals().abs(), torch.tensor([torch.inf])])
    return torch.cat([x, -x])


def test_bfloat16_split_and_merge_give_every_number_back() -> None:
    x = torch.cat(
        [random_patterns(2_000_000, seed=6), edges(torch.bfloat16), bfloat16_neighbourhoods()]
    )
    x = x[~x.isnan()]
    rounded, remainder = split(x, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert remainder.dtype == torch.int16
    assert torch.equal(bits_of(merge(rounded, remainder)), bits_of(x))
    assert (remainder[x.isinf()] == 0).all()


def test_bfloat16_split_rounds_to_nearest_and_ties_away_from_zero() -> None:
    x = torch.cat([random_patterns(500_000, seed=7), bfloat16_neighbourhoods()])
    x = x[x.isfinite()]
    rounded, _ = split(x, torch.bfloat16)
    below, above, share = neighbours(x, torch.bfloat16)
    assert (share == 0.5).any()
    expected = torch.where(share >= 0.5, above, below).copysign(x.double())
    assert torch.equal(rounded.double(), expected)
    assert torch.equal(rounded.signbit(), x.signbit())


def test_float16_split_and_merge_are_exact_for_normals_and_to_two_to_the_minus_38_below() -> None:
    small = torch.randn(500_000, generator=torch.Generator().manual_seed(8)) * 1e-5
    x = torch.cat(
        [
            *(random_patterns(2_000_000, seed=9), small),
            *(edges(torch.float16), float16_neighbourhoods(), float16_subnormals()),
        ]
    )
    x = x[~x.isnan()]
    rounded, remainder = split(x, torch.float16)
    assert remainder.dtype == torch.int16
    assert torch.equal(bits_of(rounded), bits_of(x.to(torch.float16)))
    merged = merge(rounded, remainder)
    assert torch.equal(merged.signbit(), x.signbit())

    normal = rounded.isfinite() & (rounded.abs() >= 2.0**-14)
    assert torch.equal(bits_of(merged[normal]), bits_of(x[normal]))

    subnormal = rounded.abs() < 2.0**-14
    error = (merged[subnormal].double() - x[subnormal].double()).abs()
    assert (error <= 2.0**-38).all()
    exact = (x[subnormal].double() * 2**37).frac() == 0
    assert (error[exact] == 0).all()
    assert exact.any()
    assert (~exact).any()

    overflowed = rounded.isinf()
    assert (remainder[overflowed] == 0).all()
    assert torch.equal(merged[overflowed], rounded[overflowed].float())
    assert (x[overflowed].abs() >= 65520).all()


@SIXTEEN
def test_split_keeps_nan_with_nothing_remaining(dtype: torch.dtype) -> None:
    rounded, remainder = split(floats(NANS), dtype)
    assert rounded.isnan().all()
    assert (remainder == 0).all()
    assert merge(rounded, remainder).isnan().all()


@SIXTEEN
def test_a_merged_number_is_split_and_merged_without_further_loss(dtype: torch.dtype) -> None:
    """State written as parts and read back does not wander, below 2^-14 either."""
    small = torch.randn(200_000, generator=torch.Generator().manual_seed(10)) * 1e-5
    x = torch.cat([random_patterns(500_000, seed=11), small, edges(dtype)])
    merged = merge(*split(x[~x.isnan()], dtype))
    assert torch.equal(bits_of(merge(*split(merged, dtype))), bits_of(merged))


@SIXTEEN
def test_a_remainder_of_another_number_never_carries_past_zero_or_infinity(
    dtype: torch.dtype,
) -> None:
    """Every stored number with remainders of every size, as after pruning or loading weights."""
    stored = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    half = 2 ** (DROPPED[dtype] - 1)
    largest = half if dtype == torch.bfloat16 else 2 * half
    for remainder in (-largest, -half + 1, -7, -1, 0, 1, 7, half - 1):
        merged = merge(stored, torch.full(stored.shape, remainder, dtype=torch.int16))
        assert torch.equal(merged.isnan(), stored.isnan())
        finite = stored.isfinite()
        off = (merged.double() - stored.double()).abs()[finite]
        unit = spacing(stored.double().abs()[finite], dtype)
        assert (off <= unit * largest / (2 * half)).all()
        number = ~stored.isnan()
        assert torch.equal(merged.signbit()[number], stored.signbit()[number])
        # bfloat16's may be float32's largest numbers, which round to it.
        infinite = stored.isinf()
        assert torch.equal(merged[infinite].to(dtype), stored[infinite])
        if remainder < 0:
            assert torch.equal(merged[stored == 0], stored[stored == 0].float())
