"""Histograms of exponents, against NumPy's frexp."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mprun.inspect.histograms import BLOCK, histogram, pooled
from mprun.inspect.numerics import Histogram

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def expected(x: torch.Tensor) -> Histogram:
    """By NumPy, a value at a time; every dtype is exact in float64."""
    values = np.abs(x.double().numpy().ravel())
    finite = values[np.isfinite(values)]
    mantissas, exponents = np.frexp(finite[finite > 0])  # 0.5 to 1: one more than ours
    counts = Counter(int(e) - 1 for e in exponents)
    powers = Counter(int(e) - 1 for e, m in zip(exponents, mantissas, strict=True) if m == 0.5)
    return Histogram(
        dict(counts),
        dict(powers),
        zero=int((values == 0).sum()),
        infinite=int(np.isinf(values).sum()),
        nan=int(np.isnan(values).sum()),
        largest=float(finite.max()) if finite.size else 0.0,
    )


def from_patterns(patterns: list[int], dtype: torch.dtype) -> torch.Tensor:
    bits = 8 * dtype.itemsize
    signed = [p - 2**bits if bits > 8 and p >= 2 ** (bits - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=INTEGERS[dtype.itemsize]).view(dtype)


@settings(max_examples=150)
@given(st.sampled_from(DTYPES), st.data())
def test_any_patterns_are_counted_as_numpy_does(dtype: torch.dtype, data: st.DataObject) -> None:
    top = 2 ** (8 * dtype.itemsize) - 1
    mantissa_bits = {8: 52, 4: 23, 2: 7, 1: 2}[dtype.itemsize]
    small = st.integers(0, 2**mantissa_bits)  # subnormal, zero, the smallest normal
    patterns = data.draw(st.lists(st.integers(0, top) | small, max_size=60))
    x = from_patterns(patterns, dtype)
    assert histogram(x) == expected(x)


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_every_number_of_a_narrow_dtype(dtype: torch.dtype) -> None:
    x = from_patterns(list(range(2 ** (8 * dtype.itemsize))), dtype)
    assert histogram(x) == expected(x)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_several_blocks_and_any_layout(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, BLOCK // 2 + 7, generator=generator, dtype=dtype)
    x *= torch.exp2(torch.randint(-200, 100, x.shape, generator=generator).to(dtype))
    x[1, :5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    assert histogram(x.t()) == histogram(x) == expected(x)


def test_nothing_and_numbers_without_exponent() -> None:
    assert histogram(torch.empty(0)) == Histogram()
    seen = histogram(torch.tensor([0.0, torch.inf, torch.nan]))
    assert (seen.nonzero, seen.total, seen.largest) == (0, 3, 0.0)


def test_subnormals_are_seen_where_denormals_are_flushed() -> None:
    x = torch.tensor([1, 2, 3, 2**22], dtype=torch.int32).view(torch.float32)
    assert torch.set_flush_denormal(True)
    try:
        seen = histogram(x)
    finally:
        torch.set_flush_denormal(False)
    assert (seen.exponents, seen.powers) == (
        {-149: 1, -148: 2, -127: 1},
        {-149: 1, -148: 1, -127: 1},
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="legal: floating-point"):
        histogram(torch.zeros(3, dtype=dtype))


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(width=32), max_size=8), max_size=5))
def test_histograms_add_up(parts: list[list[float]]) -> None:
    tensors = [torch.tensor(p, dtype=torch.float32) for p in parts]
    together = torch.cat([*tensors, torch.empty(0)])
    assert pooled(histogram(x) for x in tensors) == histogram(together)
