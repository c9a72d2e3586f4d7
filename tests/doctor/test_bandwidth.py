"""Bandwidth by size: what is measured, and which rate an op is held against."""

from __future__ import annotations

import pytest
import torch

from mprun.doctor import measure
from mprun.doctor.measure import measure_bandwidths, moving_s
from mprun.precision.rates import Timer
from mprun.results.roofline_result import Bandwidth
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

    monkeypatch.setattr(measure, "alternate", times)
    (found,) = measure_bandwidths(CPU, [2**16])
    assert found == Bandwidth(bytes=2**16, gigabytes_per_second=2**16 / 1e-6 / 1e9, by="read")


def test_bytes_beyond_a_size_have_its_rate() -> None:
    rows = [row(100, 50.0), row(400, 80.0), row(1600, 10.0)]
    # up to 400 bytes: a faster larger size is possible for a small one too
    assert moving_s(rows, 0) == 0
    assert moving_s(rows, 50) == pytest.approx(50 / 80e9)
    assert moving_s(rows, 1600) == pytest.approx(1600 / 80e9)
    assert moving_s(rows, 5600) == pytest.approx(1600 / 80e9 + 4000 / 10e9)
    assert moving_s(rows[2:], 5600) == pytest.approx(5600 / 10e9)
