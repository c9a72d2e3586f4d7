"""Effective bits by hand, and within their bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mprun.inspect.format_search import EffectiveBits, GemmName, GemmSize, gemm_bits, gemm_sizes
from mprun.precision.gemms import GEMMS, PRODUCT_FORMATS, model_gemms
from mprun.records.layer_values import PRODUCTS


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 64), nn.Linear(64, 10))


def counted(model: nn.Module, x: Tensor) -> dict[GemmName, GemmSize]:
    return gemm_sizes(model, lambda: model(x).sum().backward())


def test_gemms_of_a_step_are_counted() -> None:
    sizes = counted(mlp(), torch.randn(5, 48))
    by_hand = {
        "0": (5 * 48 * 32, {"forward": 48, "grad_weight": 5}),  # nobody needs the images' gradient
        "2": (5 * 32 * 64, {"forward": 32, "grad_input": 64, "grad_weight": 5}),
        "3": (5 * 64 * 10, {"forward": 64, "grad_input": 10, "grad_weight": 5}),
    }
    assert sizes == {
        GemmName(layer, product): GemmSize(operations, summed)
        for layer, (operations, rows) in by_hand.items()
        for product, summed in rows.items()
    }


def test_a_frozen_weight_and_a_layer_that_is_not_called_have_no_gemm() -> None:
    model = mlp()
    model[2].weight.requires_grad_(False)
    model.append(nn.Identity())
    model[4].unused = nn.Linear(16, 16)  # type: ignore[assignment]
    names = [str(name) for name in counted(model, torch.randn(5, 48))]
    assert "2.grad_weight" not in names
    assert "2.grad_input" in names
    assert not any("unused" in name for name in names)


def test_a_layer_that_is_called_twice_counts_twice_and_positions_are_rows() -> None:
    layer = nn.Linear(16, 16)
    x = torch.randn(2, 3, 16)
    sizes = gemm_sizes(nn.Sequential(layer), lambda: layer(layer(x)).sum().backward())
    assert sizes[GemmName("0", "forward")] == GemmSize(2 * 6 * 16 * 16, 16)
    assert sizes[GemmName("0", "grad_weight")] == GemmSize(2 * 6 * 16 * 16, 6)
    assert sizes[GemmName("0", "grad_input")].operations == 6 * 16 * 16  # x needs none


@pytest.mark.parametrize(
    ("mode", "product", "summed", "bits"),
    [
        ("nvfp4", "forward", 64, 4.5),  # 4 and 8/16 of the scale
        ("mxfp8", "grad_weight", 64, 8.25),
        ("fp8_tensorwise", "grad_input", 64, 8),
        ("fp8_rowwise", "forward", 64, 8.5),  # a float32 scale for 64 numbers
        ("fp8_rowwise_hp", "grad_input", 64, (8.5 + 8) / 2),  # the weight's is the tensor's
        ("fp8_rowwise_hp", "grad_weight", 64, 16),
        ("fp32", "forward", 64, 32),
    ],
)
def test_bits_of_a_gemm(mode: str, product: str, summed: int, bits: float) -> None:
    assert gemm_bits(getattr(PRODUCT_FORMATS[mode], product), summed) == bits


def test_effective_bits_by_hand() -> None:
    model = mlp()
    bits = EffectiveBits(counted(model, torch.randn(5, 48)), model_gemms(model, {}, "nvfp4"))
    first, inner, last = 2 * 48 * 32, 3 * 32 * 64, 3 * 64 * 10
    whole = first + inner + last
    assert bits.formatted == [GemmName("2", product) for product in PRODUCTS]
    assert bits.of(()) == pytest.approx((16 * (first + last) + 4.5 * inner) / whole, rel=1e-15)
    one = (16 * (first + last + inner / 3) + 4.5 * inner * 2 / 3) / whole
    assert bits.of([GemmName("2", "grad_input")]) == pytest.approx(one, rel=1e-15)
    assert bits.of(bits.formatted) == 16


@given(
    mode=st.sampled_from(sorted(GEMMS)),
    shapes=st.lists(st.tuples(*[st.integers(16, 512)] * 3, st.booleans()), min_size=1, max_size=6),
    chosen=st.sets(st.integers(0, 17)),
)
def test_effective_bits_are_between_the_formats_and_bfloat16(
    mode: str, shapes: list[tuple[int, int, int, bool]], chosen: set[int]
) -> None:
    """Of 16 rows or more a scale takes at most 2 bits a number, so every format is below 16."""
    sizes, gemms = {}, {}
    for n, (rows, k, out, converted) in enumerate(shapes):
        for product, summed in zip(PRODUCTS, (k, out, rows), strict=True):
            sizes[GemmName(str(n), product)] = GemmSize(rows * k * out, summed)
        if converted:
            gemms[str(n)] = GEMMS[mode]
    bits = EffectiveBits(sizes, gemms)
    high = [name for n, name in enumerate(bits.formatted) if n in chosen]
    assert 4 <= bits.of(()) <= bits.of(high) <= bits.of(bits.formatted) == 16
    # Each GEMM in bfloat16 adds its own part, whatever else is high.
    added = sum(bits.of([name]) - bits.of(()) for name in high)
    assert bits.of(high) - bits.of(()) == pytest.approx(added, abs=1e-9)  # sums of float64
