"""Estimates from data sheets: against figures by hand and what is published; on the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mprun.console import print_table
from mprun.console.fitted_table import FittedTable
from mprun.precision.gemms import GEMMS
from mprun.records.policy_columns import FORMAT_MODES
from mprun.results.estimates import (
    FACTORS,
    GPUS,
    LINK_BANDWIDTHS,
    ScalingEstimate,
    Shape,
    estimate_scaling,
    modes_of,
    predicted,
    predicted_us,
    scaling_parts,
    sent_bytes,
    verdicts,
)
from mprun.results.memory_result import ParallelKind
from tests.schema import conforms

H100 = GPUS["h100"]


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


def test_factors_are_those_of_the_modes_products() -> None:
    """Numbers in a long row: scales of rows take no memory to speak of."""
    for mode, products in FORMAT_MODES.items():
        assert list(FORMAT_MODES) == list(GEMMS)
        for names, gemm in zip(products, GEMMS[mode], strict=True):
            for name, form in zip(names, (gemm.left, gemm.right), strict=True):
                if form is None:
                    assert name == "bfloat16"
                    continue
                assert FACTORS[name].bits == pytest.approx(form.bits_per_number(2**20), rel=1e-5)
                has_tensor_scale = form.block == "tensor" or form.scale == "e4m3"
                assert FACTORS[name].passes == 1 + has_tensor_scale


def test_formats_are_those_of_the_units() -> None:
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


@pytest.mark.parametrize(
    ("parallel", "world_size", "sent"),
    [
        ("ddp", 1, 0),
        ("ddp", 2, 4000),  # 2 x 1/2 x 4,000
        ("ddp", 8, 7000),  # 2 x 7/8 x 4,000
        ("fsdp2", 2, 4000),  # 1/2 x (2 x 2,000 + 4,000)
        ("fsdp2", 8, 7000),
    ],
)
def test_a_ring_sends(parallel: ParallelKind, world_size: int, sent: int) -> None:
    assert sent_bytes(parallel, world_size, 2000, 4000) == sent
    micro_batches = 3 if parallel == "fsdp2" else 1  # DDP averages once in a step
    assert sent_bytes(parallel, world_size, 2000, 4000, micro_batches=3) == micro_batches * sent


def estimated(**changes: Any) -> ScalingEstimate:
    arguments: dict[str, Any] = {
        "parallel": "ddp",
        "world_size": 8,
        "compute_ms": 40.0,
        "compute_from": "measured step",
        "gather_dtype": None,
        "reduce_dtype": "float32",
        "sent_bytes": 100_000_000,
        "links": ["ethernet_10g", "infiniband_ndr", "ethernet_10g"],
    }
    return estimate_scaling(**(arguments | changes))


def test_a_step_by_hand() -> None:
    found = estimated()
    slow, fast = found.links  # a link is shown once
    assert found.estimate is True
    assert (slow.link, slow.communication_ms) == ("ethernet_10g", 80.0)  # 0.1 GB / 1.25 GB/s
    assert (slow.overlapped_ms, slow.sequential_ms) == (80.0, 120.0)
    assert slow.share == pytest.approx(2 / 3)
    assert (fast.communication_ms, fast.overlapped_ms, fast.sequential_ms) == (2.0, 40.0, 42.0)
    assert found.enough_gigabytes_per_second == pytest.approx(10.0)  # 0.1 GB in 10 of 50 ms
    assert found.enough_link == "ethernet_100g"
    assert "as measured here" in found.assumptions


def test_every_link_has_a_rate_and_a_source() -> None:
    for link in LINK_BANDWIDTHS.values():
        assert link.gigabytes_per_second > 0
        assert link.source.startswith(("NVIDIA", "PCI-SIG", "IEEE", "InfiniBand"))
    assert LINK_BANDWIDTHS["pcie4"].gigabytes_per_second == pytest.approx(
        16 * 16 * 128 / 130 / 8, rel=1e-4
    )


def test_it_is_labelled_and_the_range_is_shown() -> None:
    of_fsdp2 = estimated(
        parallel="fsdp2",
        compute_from="least time",
        gather_dtype="bfloat16",
        links=["ethernet_10g"],
    )
    table, summary, assumptions = scaling_parts(of_fsdp2)
    assert isinstance(table, FittedTable)
    console = Console(file=io.StringIO(), width=100)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "ESTIMATE: a step on 8 processes, fsdp2" in text
    row = next(line for line in text.splitlines() if line.startswith("ethernet"))
    # 8 x 40 ms of one process over a step of 80 to 120 ms
    assert row.split() == ["ethernet_10g", "1.25", "80", "67", "%", "80-120", "2.67-4"]
    assert summary == (
        "each process computes 40 ms (least time) and sends 100 MB a step (parameters in bfloat16, "
        "gradients in float32); without overlap, communication takes less than 20 % of a step "
        "above 10 GB/s (ethernet_100g)"
    )
    assert str(assumptions).startswith("ESTIMATE, not measured: links reach")
    assert "(n-1)/n x (2 x parameters + gradients)" in str(assumptions)
    assert "as the roofline allows" in str(assumptions)


def test_where_no_link_is_enough() -> None:
    found = estimated(sent_bytes=10**13)
    assert found.enough_link is None
    assert "(no link of the table)" in str([*scaling_parts(found)][1])
