"""The conditions of a run: filled by a callback, and part of every record."""

from __future__ import annotations

from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.records.run_record import Conditions, read_summary
from mprun.train import recorder
from mprun.train.callbacks import StepLine
from mprun.train.machine.conditions import OthersShare
from mprun.train.recorder import ConditionsRecorder
from tests.summaries import example


def line(step: int, ms: float, timed: bool = True) -> StepLine:
    return StepLine(step, 1, 0.5, 0.1, 1.0, False, ms, 0.0, timed)


def test_the_conditions_are_what_the_machine_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, now = iter([2000.0, 3000.0, 2500.0]), iter([10.0, 10.5, 11.0, 12.0])
    monkeypatch.setattr(recorder, "clock_mhz", lambda: next(clocks))
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(recorder.LoadMeter, "share", lambda _: OthersShare(0.25, 0.125))
    monkeypatch.setattr(recorder.LoadMeter, "__init__", lambda _: None)
    summary = example()
    conditions = ConditionsRecorder(summary)
    steps = [line(i, 10.0 if i < 20 else 12.0) for i in range(36)]
    conditions.on_steps([*steps[:10], line(99, 500.0, timed=False)])
    for part in (steps[10:20], steps[20:30], steps[30:]):  # half a second later: no reading
        conditions.on_steps(part)
    conditions.on_end("completed")
    assert summary.conditions == Conditions(
        other_load=0.25,
        steal=0.125,
        clock_mhz=2500.0,
        clock_start_mhz=2000.0,
        clock_end_mhz=2500.0,
        drift=1.2,
    )


def test_every_run_records_its_conditions() -> None:
    small = ["recipe=linear", "recipe.model.in_features=8", "recipe.model.out_features=4"]
    assert main([*small, "run.dir=run", "train.max_steps=40"]) == 0
    conditions = read_summary(Path("run")).conditions
    assert conditions is not None
    assert conditions.drift is not None
    assert conditions.drift > 0
    assert main(["run.resume=run", "train.max_steps=45"]) == 0
    resumed = read_summary(Path("run")).conditions
    assert resumed is not None
    assert resumed.drift is None  # its last part had five steps
