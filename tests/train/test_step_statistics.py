"""Statistics of steps: right within a stated error, without the warm-up, in bounded memory."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.records.run_record import DataTimes, StepTimes
from mprun.train import clock
from mprun.train.clock import (
    BIN_WIDTH,
    LEAST,
    MAX_VALUES,
    Distribution,
    StepStatistics,
    ThinnedSeries,
)


def quantiles(values: Iterable[float]) -> list[float | None]:
    return Distribution().plus(values).quantiles(0.1, 0.5, 0.9)


def series(values: Iterable[float]) -> ThinnedSeries:
    made = ThinnedSeries()
    for value in values:
        made.add(value)
    return made


def statistics_of(steps: int) -> StepStatistics:
    """Steps of 1, 2, ... ms whose waits are a tenth."""
    statistics = StepStatistics()
    for i in range(1, steps + 1):
        statistics.add(float(i), i / 10)
    return statistics


# Distributions


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_quantiles_are_numpys_within_the_width_of_a_bin(values: list[float]) -> None:
    expected = np.percentile(values, [10, 50, 90])
    # Numbers below LEAST share a bin.
    assert quantiles(values) == pytest.approx(tuple(expected), rel=BIN_WIDTH, abs=LEAST)


def test_a_million_numbers_take_the_room_of_their_bins() -> None:
    drawn = np.random.default_rng(0).lognormal(sigma=0.3, size=200_000)
    distribution = Distribution()
    rooms = []
    for part in np.split(drawn, [100_000]):
        for value in part.tolist():
            distribution.add(value)
        rooms.append(len(distribution.bins()))
    assert rooms[1] < 1.1 * rooms[0] < 3_500  # a factor of 15 between the extremes
    assert distribution.quantiles(0.1, 0.5, 0.9) == pytest.approx(
        list(np.percentile(drawn, [10, 50, 90])), rel=BIN_WIDTH
    )


# Series


@pytest.mark.parametrize("length", [7, 8, 9, 100, 1000])
def test_a_long_series_is_thinned_evenly(length: int) -> None:
    series = ThinnedSeries(most=8)
    for i in range(length):
        series.add(float(i))
    assert min(length, 4) <= len(series.values) <= 8
    assert length >= 8 or series.values == list(range(length))
    assert series.seen == length
    for i, value in enumerate(series.values):
        assert i * series.width <= value < (i + 1) * series.width


def test_the_choice_is_not_always_the_same_place() -> None:
    """A step in 64 is slow: so is one in 64 of those chosen."""
    series = ThinnedSeries()
    for i in range(64 * 8192):
        series.add(float(i % 64 == 0))
    slow = sum(series.values)
    # Binomial, n = 4096 and p = 1/64: mean 64, standard deviation 8.
    assert 24 < slow < 104


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
    assert clock.drift(series(map(float, range(1, steps + 1)))) == pytest.approx(drift)


def test_the_drift_of_many_steps_is_near_that_of_all() -> None:
    """From 1 ms to 2 ms in 100,000 steps: the thirds' medians are 7/6 and 11/6."""
    times = series(1 + i / 1e5 for i in range(100_000))
    assert len(times.values) <= MAX_VALUES
    assert clock.drift(times) == pytest.approx(11 / 7, rel=1e-3)


def test_steps_of_no_time_have_no_drift() -> None:
    assert clock.drift(series([0.0] * 60)) is None


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


def test_page_faults_are_the_median_of_the_timed_steps() -> None:
    statistics = StepStatistics()
    for faults in [9000] * 3 + [4, 8, 6]:
        statistics.add(1.0, 0.1, faults)
    assert statistics.page_faults_per_step() == 6
    uncounted = statistics_of(10)
    assert uncounted.page_faults_per_step() is None


@pytest.mark.parametrize("before", [2, 50, 300])
def test_statistics_continue_where_they_were_saved(before: int) -> None:
    whole, first, resumed = statistics_of(400), statistics_of(before), StepStatistics()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for i in range(before + 1, 401):
        resumed.add(float(i), i / 10)
    assert resumed.step_times() == whole.step_times()
    assert resumed.data_times() == whole.data_times()
