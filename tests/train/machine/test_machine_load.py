"""How many threads rates are measured with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.train.machine.machine import is_busy, threads_to_measure
from tests.train.machine import machine


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({}, 8),
        ({"load_average": 0.5}, 8),
        ({"load_average": 1.1}, 6),
        ({"load_average": 7.9}, 1),
        ({"load_average": 50.0}, 1),
        ({"load_average": 4.0, "threads": 4}, 4),
        ({"load_average": None}, 8),
        ({"cores_total": None, "load_average": 50.0}, 8),
        ({"cpu_quota": 2.5}, 2),
        ({"cpu_quota": 0.5}, 1),
        ({"cpu_quota": 64.0}, 8),
        ({"threads": 64}, 8),
        ({"threads": 1, "load_average": 3.0}, 1),
        # 4 of 16 cores are this process's; the load is the whole machine's.
        ({"cores_total": 16, "threads": 4, "load_average": 13.5}, 2),
        ({"cores_total": 16, "threads": 4, "load_average": 11.0}, 4),
    ],
    ids=str,
)
def test_threads_are_those_that_have_a_core(changes: dict[str, Any], threads: int) -> None:
    assert threads_to_measure(machine("AVX2", **changes)) == threads


@given(
    st.integers(1, 256),
    st.integers(1, 256),
    st.none() | st.floats(0, 1000),
    st.none() | st.floats(0.01, 256),
)
def test_there_is_one_thread_and_never_more_than_pytorch_s(
    threads: int, cores: int, load: float | None, quota: float | None
) -> None:
    where = machine(threads=threads, cores_total=cores, load_average=load, cpu_quota=quota)
    assert 1 <= threads_to_measure(where) <= threads


def test_too_many_threads_alone_are_no_load() -> None:
    assert not is_busy(machine(threads=64, load_average=0.0))
