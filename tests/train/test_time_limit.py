"""Training ends in time for its evaluation."""

from __future__ import annotations

import pytest

from mprun.train import stopwatch
from mprun.train.stopwatch import Stopwatch, TimeLimit
from tests.train.test_stopwatch import FakeTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(stopwatch, "time", fake)
    return fake


def limit(
    clock: FakeTime, limit_s: float | None = 100.0, start_up_s: float = 10.0, before_s: float = 0.0
) -> TimeLimit:
    """A limit that began at 100 s; 400 samples are evaluated."""
    clock.now = 100.0
    watch = Stopwatch()
    clock.now += start_up_s
    made = TimeLimit(limit_s, watch, evaluated=400)
    made.begin(before_s)
    return made


def over_at(made: TimeLimit, clock: FakeTime, second: float) -> bool:
    """Whether training is over at this second, and was not just before."""
    clock.now = second - 0.01
    assert not made.is_training_over()
    clock.now = second + 0.01
    return made.is_training_over()


def test_the_limit_begins_with_the_start_up(clock: FakeTime) -> None:
    assert over_at(limit(clock), clock, 200.0)


def test_evaluation_and_one_more_step_are_reserved(clock: FakeTime) -> None:
    made = limit(clock)
    made.add_step(2.0, 32)
    made.add_step(1.0, 32)  # 12.5 s of evaluation
    made.add_step(3.0, 32)  # a slow one
    assert over_at(made, clock, 200.0 - 12.5 - 3.0)


def test_evaluation_gets_at_most_half_of_the_time_after_start_up(clock: FakeTime) -> None:
    made = limit(clock)
    made.add_step(1.0, 1)  # 400 s of evaluation
    assert over_at(made, clock, 200.0 - 45.0 - 1.0)


def test_a_long_start_up_leaves_half_of_the_limit(clock: FakeTime) -> None:
    assert over_at(limit(clock, start_up_s=80.0), clock, 180.0 + 50.0)


def test_a_run_that_ended_by_time_has_spent_all_of_it(clock: FakeTime) -> None:
    made = limit(clock)
    made.add_step(1.0, 20)  # 20 s of evaluation
    clock.now = 120.0
    assert made.spent_s == 20.0
    clock.now = 180.0  # time for evaluation is left
    assert made.is_training_over()
    assert made.spent_s == 100.0
    assert limit(clock, before_s=100.0).is_training_over()
    longer = limit(clock, limit_s=200.0, before_s=100.0)
    assert over_at(longer, clock, 200.0)


def test_no_limit_is_no_limit(clock: FakeTime) -> None:
    made = limit(clock, limit_s=None)
    made.add_step(1e9, 1)
    clock.now = 1e12
    assert not made.is_training_over()
    assert made.spent_s == 1e12 - 100
