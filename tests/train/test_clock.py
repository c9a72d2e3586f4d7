"""Step times: measured from batch to update, and summed up without the warm-up."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.records.run_record import DataTimes, StepTimes
from mprun.train import clock as timing
from mprun.train.clock import CudaClock, HostClock, StepStatistics, clock_for, quantiles


def statistics_of(steps: int) -> StepStatistics:
    """Steps of 1, 2, ... ms whose waits are a tenth."""
    statistics = StepStatistics()
    for i in range(1, steps + 1):
        statistics.add(float(i), i / 10)
    return statistics


# Quantiles


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_quantiles_are_numpys(values: list[float]) -> None:
    # Both interpolate between the same two values; the last bits depend on how it is written.
    expected = np.percentile(values, [10, 50, 90])
    assert quantiles(values) == pytest.approx(tuple(expected), rel=1e-12, abs=1e-300)


def test_quantiles_of_nothing_and_of_one() -> None:
    assert quantiles([]) == (None, None, None)
    assert quantiles([2.5]) == (2.5, 2.5, 2.5)


# Statistics


@pytest.mark.parametrize(
    ("steps", "warmup"), [(0, 0), (1, 1), (3, 3), (4, 3), (99, 3), (100, 10), (1000, 10)]
)
def test_the_first_steps_are_warm_up(steps: int, warmup: int) -> None:
    times = statistics_of(steps).step_times()
    assert (times.warmup, times.n) == (warmup, steps - warmup)


@pytest.mark.parametrize(
    ("steps", "drift"),
    [(0, None), (32, None), (33, 28.5 / 8.5), (36, 31.0 / 9.0), (103, 88.0 / 26.0)],
)
def test_drift_is_the_last_third_over_the_first(steps: int, drift: float | None) -> None:
    """Steps of 1, 2, ... ms: of 33, the thirds after the warm-up are 4 to 13 and 24 to 33."""
    assert statistics_of(steps).drift() == pytest.approx(drift)


def test_steps_of_no_time_have_no_drift() -> None:
    statistics = StepStatistics()
    for _ in range(60):
        statistics.add(0.0, 0.0)
    assert statistics.drift() is None


def test_the_times_are_of_the_steps_after_the_warm_up() -> None:
    statistics = statistics_of(103)
    rest = np.arange(11, 104)
    times, waits = statistics.step_times(), statistics.data_times()
    p10, median, p90 = np.percentile(rest, [10, 50, 90])
    # Waits are tenths, which binary numbers round.
    assert (times.p10, times.median, times.p90) == pytest.approx((p10, median, p90))
    assert (waits.median, waits.p90) == pytest.approx((median / 10, p90 / 10))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_warm_up_alone_gives_no_times(steps: int) -> None:
    statistics = statistics_of(steps)
    none = StepTimes(median=None, p10=None, p90=None, n=0, warmup=steps)
    assert statistics.step_times() == none
    assert statistics.data_times() == DataTimes(median=None, p90=None)
    assert statistics.samples_per_second(64) is None


def test_throughput_counts_step_and_wait() -> None:
    statistics = StepStatistics()
    for step_ms, data_ms in [(900.0, 900.0)] * 3 + [(3.0, 1.0), (4.0, 1.0), (5.0, 7.0)]:
        statistics.add(step_ms, data_ms)
    assert statistics.samples_per_second(64) == 64 / (4.0 + 1.0) * 1e3


# Clocks


def test_the_host_clock_times_from_start_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 1.5, 10.0, 10.25, 20.0, 20.125])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    clock = HostClock()
    for _ in range(2):
        clock.start()
        clock.stop()
    assert [x.ms for x in clock.take()] == [500.0, 250.0]
    assert clock.take() == []
    clock.pause()
    clock.start()
    clock.stop()
    assert [x.ms for x in clock.take()] == [125.0]


def test_the_host_clock_counts_the_page_faults_of_a_step() -> None:
    clock, pages = HostClock(), 1000
    with mmap.mmap(-1, 2 * pages * mmap.PAGESIZE) as block:
        touched = [slice(0, pages), slice(0, pages), slice(pages, 2 * pages)]
        for part in touched:
            clock.start()
            for page in range(part.start, part.stop):
                block[page * mmap.PAGESIZE] = 1
            clock.stop()
            block[-1] = 0  # between two steps
    first, again, other = (x.page_faults for x in clock.take())
    if first is None:
        pytest.skip("this system does not count page faults")
    # Huge pages make fewer faults. Python and other threads may add a few.
    assert first >= pages / 512
    assert again is not None
    assert other is not None
    assert again < min(first, other)


def test_page_faults_are_the_median_of_the_timed_steps() -> None:
    statistics = StepStatistics()
    for faults in [9000] * 3 + [4, 8, 6]:
        statistics.add(1.0, 0.1, faults)
    assert statistics.page_faults_per_step() == 6
    uncounted = statistics_of(10)
    assert uncounted.page_faults_per_step() is None


class Event:
    """A CUDA event of a device that needs a millisecond between events."""

    now = 0.0

    def __init__(self) -> None:
        Event.now += 1
        self.at, self.awaited = Event.now, False

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at

    def synchronize(self) -> None:
        self.awaited = True


def test_the_cuda_clock_takes_differences_of_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []

    def event() -> Event:
        made.append(Event())
        return made[-1]

    monkeypatch.setattr(CudaClock, "_event", staticmethod(event))
    clock = CudaClock()
    assert clock.take() == []
    for _ in range(3):
        clock.start()
        clock.stop()
    assert len(made) == 4  # the first start, then an event per step
    assert not any(e.awaited for e in made)
    assert [x.ms for x in clock.take()] == [1.0, 1.0, 1.0]
    assert [e.awaited for e in made] == [False, False, False, True]
    Event.now += 100
    clock.start()
    clock.stop()
    assert [x.ms for x in clock.take()] == [101.0]
    clock.pause()
    Event.now += 100  # validation
    clock.start()
    clock.stop()
    assert [x.ms for x in clock.take()] == [1.0]


def test_each_device_has_its_clock() -> None:
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("cuda")), CudaClock)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_cuda_clock_times_a_kernel() -> None:
    clock = CudaClock()
    a = torch.ones(1024, 1024, device="cuda")
    for _ in range(3):
        clock.start()
        a = a @ a
        clock.stop()
    times = clock.take()
    assert len(times) == 3
    assert all(t > 0 for t in times)
