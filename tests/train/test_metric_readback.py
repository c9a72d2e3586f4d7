"""Readings come back in order and as they were, whichever way they are kept."""

from __future__ import annotations

import pytest
import torch

from mprun.train.metric_readback import (
    DeviceReadings,
    HostReadings,
    Reading,
    Readings,
    Scalars,
    readings_for,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("readings", [HostReadings(), DeviceReadings(CPU, capacity=8)])
def test_readings_come_back_in_order(readings: Readings) -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    for i in range(5):
        readings.put(Scalars(*map(torch.tensor, (2.0 * i, i, 2.0**i, i % 2.0))))
    assert readings.take() == [Reading(2.0 * i, i, 2.0**i, i % 2 == 1) for i in range(5)]
    assert readings.take() == []
    readings.put(Scalars(weight))
    assert readings.take() == [Reading(2.0, None)]


def test_a_device_buffer_says_when_it_is_full() -> None:
    readings = DeviceReadings(CPU, capacity=2)
    readings.put(Scalars(torch.tensor(1.0)))
    assert not readings.full
    readings.put(Scalars(torch.tensor(2.0)))
    assert readings.full
    readings.take()
    assert not readings.full


def test_the_kind_follows_the_device() -> None:
    assert isinstance(readings_for(CPU), HostReadings)
