"""Metrics are read back in order and unchanged, on the host and from a device."""

from __future__ import annotations

import pytest
import torch

from mprun.train.sums import DeviceReadback, MetricReadback, Scalars, StepMetrics

CPU = torch.device("cpu")


@pytest.mark.parametrize("readback", [MetricReadback(), DeviceReadback(capacity=8)])
def test_metrics_are_read_back_in_order(readback: MetricReadback) -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    for i in range(5):
        readback.put(Scalars(*map(torch.tensor, (2.0 * i, i, 2.0**i, i % 2.0))))
    assert readback.take() == [StepMetrics(2.0 * i, i, 2.0**i, i % 2 == 1) for i in range(5)]
    assert readback.take() == []
    readback.put(Scalars(weight))
    assert readback.take() == [StepMetrics(2.0, None)]


@pytest.mark.parametrize("readback", [MetricReadback(), DeviceReadback(capacity=8)])
def test_each_step_has_the_parts_of_its_own_loss(readback: MetricReadback) -> None:
    names = [("a",), (), ("b", "a"), ("a", "b", "c")]
    expected = []
    for step, own in enumerate(names):
        parts = {name: 10.0 * step + place for place, name in enumerate(own)}
        tensors = {name: torch.tensor(part) for name, part in parts.items()}
        readback.put(Scalars(torch.tensor(float(step)), parts=tensors))
        expected.append(StepMetrics(float(step), parts=parts))
    assert readback.take() == expected
    readback.put(Scalars(None))
    assert readback.take() == [StepMetrics(None)]


def test_a_device_buffer_says_when_it_is_full() -> None:
    readback = DeviceReadback(capacity=2)
    readback.put(Scalars(torch.tensor(1.0)))
    assert not readback.full
    readback.put(Scalars(torch.tensor(2.0)))
    assert readback.full
    readback.take()
    assert not readback.full
