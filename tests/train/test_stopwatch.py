"""The stopwatch: every second is in one category, and it continues from a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from mprun.train import stopwatch
from mprun.train.stopwatch import Stopwatch


class FakeTime:
    """A `time` whose clock only moves when the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(stopwatch, "time", fake)
    return fake


def fail_after(clock: FakeTime, s: float) -> None:
    clock.now += s
    raise ZeroDivisionError


def seconds(watch: Stopwatch) -> dict[str, float]:
    """The categories with any time; they sum to the wall time."""
    wall_s, budget = watch.read()
    assert budget is not None
    assert sum(vars(budget).values()) == pytest.approx(wall_s, rel=1e-12)
    return {name: value for name, value in asdict(budget).items() if value}


def test_each_second_is_in_the_current_category(clock: FakeTime) -> None:
    watch = Stopwatch(started_at=98.0)
    clock.now += 1
    watch.switch("data")
    clock.now += 0.5
    assert watch.switch("compute") == clock.now
    clock.now += 4
    with watch.during("logging"):
        clock.now += 0.25
        with pytest.raises(ZeroDivisionError), watch.during("checkpoints"):
            fail_after(clock, 2)
        clock.now += 0.25
    clock.now += 1
    assert seconds(watch) == {
        "start_up": 3.0,
        "data": 0.5,
        "compute": 5.0,
        "logging": 0.5,
        "checkpoints": 2.0,
    }
    assert watch.after_start_up_s == 8.0
    assert watch.elapsed_here_s == 11.0


def test_a_resumed_run_continues_the_seconds(clock: FakeTime) -> None:
    first = Stopwatch()
    clock.now += 1
    first.switch("compute")
    clock.now += 5
    state = first.state_dict()
    clock.now += 50  # after the checkpoint: lost
    second = Stopwatch()
    clock.now += 2
    second.resume(state["elapsed_s"], state["time_budget_s"])  # type: ignore[arg-type]
    assert seconds(second) == {"start_up": 3.0, "compute": 5.0}
    assert second.elapsed_here_s == 2.0
    assert second.read()[0] == 8.0


def test_the_start_of_the_process_is_before_its_first_import() -> None:
    code = (
        "import time; time.sleep(0.1); began = time.perf_counter()\n"
        "from mprun.train.stopwatch import process_start\n"
        "print(began - process_start())"
    )
    before = time.perf_counter()
    text = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    outside_s = time.perf_counter() - before
    least = 0.09 if sys.platform == "linux" else -outside_s
    assert least < float(text) < outside_s + 0.02


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("age_s", [-5.0, 1e6])
def test_an_impossible_age_is_not_believed(monkeypatch: pytest.MonkeyPatch, age_s: float) -> None:
    fake = SimpleNamespace(
        perf_counter=time.perf_counter,
        CLOCK_BOOTTIME=0,
        clock_gettime=lambda clock: own_start_s() + age_s,
    )
    monkeypatch.setattr(stopwatch, "time", fake)
    assert stopwatch.process_start() == stopwatch.IMPORTED_AT


def own_start_s() -> float:
    """The start of this process in seconds since the machine's."""
    text = Path("/proc/self/stat").read_text(encoding="utf-8")
    ticks = int(text.rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")
