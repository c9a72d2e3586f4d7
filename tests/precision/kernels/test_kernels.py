"""The compiled loops have the bits of the PyTorch versions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mprun.precision import kernels
from mprun.precision import random_bits as random_bits_module
from mprun.precision import rounding as rounding_module
from mprun.precision.random_bits import Key, key, random_bits
from mprun.precision.rounding import (
    DTYPES,
    OVERFLOWS,
    SERIAL,
    round_stochastic,
    stochastic,
)
from tests.each import each
from tests.precision.test_rounding import bits_of, floats, random_patterns

needs_c = pytest.mark.skipif(
    kernels.why_not() is not None, reason=f"no compiled kernels: {kernels.why_not()}"
)
EVERY_CASE = [(dtype, overflow) for dtype in DTYPES for overflow in OVERFLOWS]
cases = each(("dtype", "overflow"), EVERY_CASE, ids=str)
KEY = key(1, 2, 3, 0)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit; of a NaN only that it is one: PyTorch's own casts differ in its payload."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(bits_of(found.contiguous())[number], bits_of(expected.contiguous())[number])


def edges() -> Tensor:
    """At every exponent the mantissas where either dtype's bits or halves begin or end."""
    mantissas = [0, 1, 2, 2**23 - 1]
    for dropped in (13, 16):
        half = 1 << (dropped - 1)
        for kept in (0, 1, 2 ** (23 - dropped) - 1):
            mantissas += [(kept << dropped) + by for by in (0, 1, half - 1, half, half + 1)]
            mantissas += [(kept << dropped) + 2 * half - 1]
    patterns = (torch.arange(256)[:, None] << 23) | torch.tensor(mantissas)
    return torch.cat([floats(patterns.view(-1)), floats(patterns.view(-1) | 0x80000000)])


def in_float16s_range(count: int) -> Tensor:
    """Mostly what float16 can hold, its subnormals and its overflow included."""
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-42, 18, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator), exponent)


def by_pytorch(x: Tensor, dtype: torch.dtype, overflow: str, words: Key = KEY) -> Tensor:
    bits = random_bits(words, x.numel()).view(x.shape)
    return round_stochastic(x.contiguous(), dtype, bits, overflow)


# ---- the same bits ----


@needs_c
@cases
def test_the_kernel_gives_the_bits_of_pytorch(dtype: torch.dtype, overflow: str) -> None:
    x = torch.cat([random_patterns(1_000_000), in_float16s_range(1_000_000), edges()])
    assert_same(stochastic(x, dtype, KEY, overflow), by_pytorch(x, dtype, overflow))


@needs_c
@cases
@each("size", [0, 1, 15, 17, 100_003])
def test_sizes_that_fill_no_vector(dtype: torch.dtype, overflow: str, size: int) -> None:
    x = in_float16s_range(size)
    assert_same(stochastic(x, dtype, KEY, overflow), by_pytorch(x, dtype, overflow))


@needs_c
@each("dtype", DTYPES, ids=str)
@each(
    ("view", "dense"),
    [
        (lambda x: x.view(300, 400).t(), True),
        (lambda x: x.view(10, 10, 30, 40).to(memory_format=torch.channels_last), True),
        (lambda x: x[7:], True),
        (lambda x: x[0], True),
        (lambda x: x[::3], False),
        (lambda x: x.view(300, 400).t()[3:9], False),
        (lambda x: x[:400].expand(100, 400), False),
        (lambda x: x.view(2, 300, 200)[:, :0], False),
    ],
)
@each("path", ["compiled", "eager"])
def test_inputs_that_do_not_lie_in_one_piece(
    dtype: torch.dtype,
    view: Callable[[Tensor], Tensor],
    dense: bool,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elements are numbered as they lie in the result's memory: that of the input where dense."""
    if path == "eager":
        monkeypatch.setattr(kernels, "why_not", lambda: "not wanted")
    whole = in_float16s_range(120_000)
    before = whole.clone()
    x = view(whole)
    found = stochastic(x, dtype, KEY)
    if dense:
        assert found.stride() == x.stride()
    order = sorted(range(x.dim()), key=found.stride, reverse=True)
    in_memory = found.permute(order)
    assert in_memory.is_contiguous()
    assert_same(in_memory, by_pytorch(x.permute(order), dtype, "infinity"))
    assert torch.equal(whole, before)


@needs_c
@each("dtype", DTYPES, ids=str)
def test_the_number_of_threads_does_not_matter(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    try:
        for size in (SERIAL - 1, SERIAL, 100_003):
            x = in_float16s_range(size)
            expected = by_pytorch(x, dtype, "infinity")
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                assert_same(stochastic(x, dtype, KEY), expected)
    finally:
        torch.set_num_threads(before)


@each("eager", [False, True])
def test_tensors_of_several_blocks_take_the_key_of_each(
    monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """With blocks of 2^10 elements instead of 2^31, and eager parts that do not divide them."""
    monkeypatch.setattr(random_bits_module, "BLOCK", 2**10)
    monkeypatch.setattr(rounding_module, "EAGER_BLOCK", 300)
    if eager:
        monkeypatch.setattr(kernels, "why_not", lambda: "not here")
    x = in_float16s_range(5_000)
    whole = by_pytorch(x, torch.float16, "infinity")
    assert_same(stochastic(x, torch.float16, KEY), whole)
    for start in (1, 63, 1023, 1024, 2_999):  # of a shard
        found = stochastic(x[start:], torch.float16, KEY, start=start)
        assert_same(found, whole[start:])
