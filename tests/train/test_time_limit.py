"""Training ends in time for its evaluation; samples that time leaves out are counted."""

from __future__ import annotations

import math

import pytest

from mprun.train import stopwatch
from mprun.train.stopwatch import CAUTION, RECORD_SHARE, Stopwatch, TimeLimit
from tests.train.test_stopwatch import FakeTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(stopwatch, "time", fake)
    return fake


def limit(
    clock: FakeTime, limit_s: float | None = 100.0, start_up_s: float = 10.0, before_s: float = 0.0
) -> TimeLimit:
    """A limit that began at 100 s; 300 samples of validation and 100 of test."""
    clock.now = 100.0
    watch = Stopwatch()
    clock.now += start_up_s
    made = TimeLimit(limit_s, watch, validation_samples=300, test_samples=100)
    made.begin(before_s)
    return made


def test_the_limit_begins_with_the_start_up(clock: FakeTime) -> None:
    made = limit(clock)
    assert made.test_until == made.validation_until == 200.0


def test_evaluation_that_fits_is_reserved(clock: FakeTime) -> None:
    made = limit(clock)
    made.reserve(0.05)  # 15 s of validation and 5 s of test
    assert made.training_until == pytest.approx(200 - CAUTION * 20 - RECORD_SHARE * 100)
    assert made.validation_until == pytest.approx(200 - CAUTION * 5)
    assert made.test_until == 200.0


def test_evaluation_gets_at_most_half_of_the_time_after_start_up(clock: FakeTime) -> None:
    made = limit(clock)
    made.reserve(1.0)  # 400 s
    assert made.training_until == pytest.approx(110 + 45 - RECORD_SHARE * 100)
    assert made.validation_until == pytest.approx(200 - 45 / 4)  # the test has a quarter of samples


def test_a_step_that_would_end_too_late_does_not_begin(clock: FakeTime) -> None:
    made = limit(clock)
    made.reserve(0.0)
    clock.now = 190.0
    assert not made.is_training_over()
    made.step_s = 9.0
    assert made.is_training_over()


def test_a_long_start_up_leaves_half_of_the_limit(clock: FakeTime) -> None:
    made = limit(clock, start_up_s=80.0)
    assert made.test_until == 180.0 + 50.0


def test_a_run_that_ended_by_time_has_spent_all_of_it(clock: FakeTime) -> None:
    made = limit(clock)
    made.reserve(0.05)
    clock.now = 120.0
    assert made.spent_s == 20.0
    clock.now = 174.0  # time for evaluation is left
    assert made.is_training_over()
    assert made.spent_s == 100.0
    again = limit(clock, before_s=100.0)
    assert again.trial_s == 0.0
    again.reserve(0.05)
    assert again.is_training_over()
    assert math.isinf(again.validation_until)
    assert math.isinf(again.test_until)
    longer = limit(clock, limit_s=200.0, before_s=100.0)
    assert not longer.is_training_over()
    assert longer.test_until == 200.0


def test_no_limit_is_no_limit(clock: FakeTime) -> None:
    made = limit(clock, limit_s=None)
    assert made.trial_s == 0.0
    made.reserve(1e9)
    clock.now = 1e12
    assert not made.is_training_over()
    assert math.isinf(made.validation_until)
    assert made.spent_s == 1e12 - 100
