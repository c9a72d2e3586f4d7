"""The estimate of a step on several processes, against figures by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mprun.config.settings import LinkName
from mprun.doctor.scaling import estimate_scaling, sent_bytes
from mprun.records.data_sheets import LINK_BANDWIDTHS
from mprun.results.estimates import ScalingEstimate
from mprun.results.memory_result import ParallelKind


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


def test_equal_dtypes_of_fsdp2_are_three_passes_around_the_ring() -> None:
    assert sent_bytes("fsdp2", 8, 4000, 4000) == 3 * 7 * 4000 // 8


def test_fsdp2_sends_for_each_micro_batch_and_ddp_once() -> None:
    assert sent_bytes("fsdp2", 8, 4000, 4000, micro_batches=3) == 3 * 10500
    assert sent_bytes("ddp", 8, 4000, 4000, micro_batches=3) == 7000


def estimated(**changes: Any) -> ScalingEstimate:
    arguments: dict[str, Any] = {
        "parallel": "ddp",
        "world_size": 8,
        "compute_ms": 40.0,
        "compute_from": "measured step",
        "gather_dtype": None,
        "reduce_dtype": "float32",
        "nbytes": 100_000_000,
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


def test_the_bandwidth_that_is_enough() -> None:
    found = estimated()
    assert found.enough_gigabytes_per_second == pytest.approx(10.0)  # 0.1 GB in 10 of 50 ms
    assert found.enough_link == "ethernet_100g"
    assert estimated(nbytes=10**13).enough_link is None


def test_the_assumptions_name_what_was_computed() -> None:
    assert "as measured here" in estimated().assumptions
    other = estimated(parallel="fsdp2", compute_from="least time").assumptions
    assert "(n-1)/n x (2 x parameters + gradients)" in other
    assert "as the roofline allows" in other


def test_every_link_has_a_rate_and_a_source() -> None:
    assert {link.name for link in LinkName} == set(LINK_BANDWIDTHS)
    for link in LINK_BANDWIDTHS.values():
        assert link.gigabytes_per_second > 0
        assert link.source.startswith(("NVIDIA", "PCI-SIG", "IEEE", "InfiniBand"))
    assert LINK_BANDWIDTHS["pcie4"].gigabytes_per_second == pytest.approx(
        16 * 16 * 128 / 130 / 8, rel=1e-4
    )
