"""Gains of formats: a hand computation, what is published, and torchao's layers."""

from __future__ import annotations

import pytest
import torch

from mprun.config.settings import Gpu
from mprun.doctor.format_gains import (
    Shape,
    layer_us,
    measured,
    modes_of,
    predicted,
    predicted_us,
)
from mprun.precision.gemms import RECIPES
from mprun.records.data_sheets import GPUS
from mprun.results.estimates import verdicts
from tests.schema import conforms

H100 = GPUS["h100"]
CPU = torch.device("cpu")


def square(size: int) -> Shape:
    return Shape(size, size, size)


def speedup(shape: Shape, name: str, gpu: str = "h100") -> float:
    return predicted_us(shape, None, GPUS[gpu]) / predicted_us(shape, name, GPUS[gpu])


def test_a_large_layer_equals_the_hand_computation() -> None:
    """8192 cubed: 2 x 8192^3 operations a product, 67.1 million numbers a factor."""
    operations, numbers = 2 * 8192**3, 8192**2
    bfloat16_us = 3 * (operations / (989e6 * 0.75) + 4)
    assert predicted_us(square(8192), None, H100) == pytest.approx(bfloat16_us)
    rounding_us = 6 * (numbers * 5 / (3350e3 * 0.85) + 2 * 4)
    float8_us = 3 * (operations / (1979e6 * 0.75) + 4) + rounding_us
    assert predicted_us(square(8192), "fp8_tensorwise", H100) == pytest.approx(float8_us)


def test_a_small_layer_is_bound_by_launches_and_traffic() -> None:
    shape = Shape(16, 32, 64)
    traffic = 2 * (16 * 32 + 64 * 32 + 16 * 64) / (3350e3 * 0.85)
    assert predicted_us(shape, None, H100) == pytest.approx(3 * (traffic + 4))


def test_gradients_of_weights_in_bfloat16_are_bfloat16_products() -> None:
    """And for gradients of inputs the weight has one factor: a second pass over it."""
    shape = square(4096)
    second_pass_us = 2 * 4096**2 / (3350e3 * 0.85) + 4
    third = predicted_us(shape, None, H100) / 3
    rowwise = predicted_us(shape, "fp8_rowwise", H100)
    expected_us = rowwise * 2 / 3 + third + second_pass_us
    assert predicted_us(shape, "fp8_rowwise_hp", H100) == pytest.approx(expected_us)


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise"])
def test_float8_is_slower_for_small_layers_and_pays_for_large_ones(name: str) -> None:
    """As measured by its users: slower below 1,000 to 4,000 features on an H100."""
    assert speedup(square(512), name) < 0.6
    assert speedup(square(1024), name) < 0.9
    assert 1.2 < speedup(square(8192), name) < 2
    gains = [speedup(square(n), name) for n in (256, 512, 1024, 2048, 4096, 8192, 16384)]
    assert gains == sorted(gains)


def test_formats_are_those_of_the_units() -> None:
    assert {*GPUS} == {gpu.name for gpu in Gpu}
    assert modes_of(GPUS["l40s"]) == ["fp8_tensorwise"]
    assert modes_of(H100) == ["fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_hp"]
    assert modes_of(GPUS["b200"])[-2:] == ["mxfp8", "nvfp4"]
    assert speedup(square(16384), "nvfp4", "b200") > speedup(square(16384), "mxfp8", "b200")


def test_the_sum_is_over_converted_layers() -> None:
    shapes = {square(4096): ["a", "b"], square(64): ["head"]}
    whole = predicted(shapes, H100, ["a", "b"])
    assert conforms(whole, type(whole))
    assert whole.source == "predicted"
    assert whole.speedup["fp8_rowwise"] == pytest.approx(speedup(square(4096), "fp8_rowwise"))
    texts = list(verdicts(whole))
    assert texts[1].startswith("fp8_rowwise pays for 2 of 3 linear layers on NVIDIA H100 SXM")
    assert predicted(shapes, H100, []).speedup == {}


def test_without_float8_units_nothing_is_measured() -> None:
    assert measured({square(64): ["a"]}, CPU, ["a"]) is None


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_a_layer_of_torchao_is_timed(name: str | None) -> None:
    """Its emulation here: the way to it is the same on a GPU."""
    assert 0 < layer_us(Shape(16, 32, 48), name, CPU, native=False) < 1e7
