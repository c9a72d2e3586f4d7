"""Bandwidth by size: what is measured, and which rate an op is held against."""

from __future__ import annotations

import pytest
import torch

from mprun.doctor import bandwidth
from mprun.doctor.bandwidth import measure_bandwidths, rate_at
from mprun.precision.rates import Timer
from mprun.records.roofline_record import Bandwidth
from tests.schema import conforms

CPU = torch.device("cpu")


def row(nbytes: int, rate: float) -> Bandwidth:
    return Bandwidth(bytes=nbytes, gigabytes_per_second=rate, by="copy")


def test_each_size_is_measured_the_smallest_first() -> None:
    begun: list[tuple[int | None, int | None]] = []
    rows = measure_bandwidths(
        CPU, [2**20, 2**16], lambda text, done=None, of=None: begun.append((done, of))
    )
    assert [r.bytes for r in rows] == [2**16, 2**20]
    assert begun == [(0, 2), (1, 2)]
    assert all(conforms(r, Bandwidth) for r in rows)
    assert all(0.1 < r.gigabytes_per_second < 1e5 for r in rows)


def test_the_fastest_traffic_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((4e-6, 1e-6, 2e-6))  # copy, read, write

    def times(timers: list[Timer], rounds: int) -> list[list[float]]:
        return [[1.0, next(seconds)]]

    monkeypatch.setattr(bandwidth, "alternate", times)
    (found,) = measure_bandwidths(CPU, [2**16])
    assert found == Bandwidth(bytes=2**16, gigabytes_per_second=2**16 / 1e-6 / 1e9, by="read")


def test_an_op_is_held_against_the_size_that_is_not_larger() -> None:
    rows = [row(100, 50.0), row(400, 80.0), row(1600, 10.0)]
    assert rate_at(rows, 50) == 80e9  # a faster larger size is possible for a small one too
    assert rate_at(rows, 400) == 80e9
    assert rate_at(rows, 1599) == 80e9
    assert rate_at(rows, 1600) == 10e9
    assert rate_at(rows, 10**9) == 10e9
