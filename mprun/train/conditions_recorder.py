"""Records the conditions of a run, which its step times depend on: load, steal, clock, drift."""

from __future__ import annotations

import statistics
import time

from mprun.doctor.conditions import LoadMeter, clock_mhz
from mprun.records.run_record import Conditions, Status, Summary
from mprun.train.callbacks import Callback, StepLine
from mprun.train.clock import StepStatistics

READ_CLOCK_EVERY_S = 1.0
"""A reading costs a file for each CPU."""


class ConditionsRecorder(Callback):
    """Sets `conditions` of the summary at the end; those of a resumed run are its last part's.

    Args:
        summary: the run's.
    """

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        self._load = LoadMeter()
        self._clock_mhz: list[float] = []
        self._read_at = -READ_CLOCK_EVERY_S
        self._steps = StepStatistics()

    def on_steps(self, lines: list[StepLine]) -> None:
        for line in lines:
            if line.timed:
                self._steps.add(line.step_time_ms, line.data_time_ms)
        now = time.perf_counter()
        if now - self._read_at >= READ_CLOCK_EVERY_S:  # the CPU has just computed a step
            self._read_at, reading = now, clock_mhz()
            self._clock_mhz += [] if reading is None else [reading]

    def on_end(self, status: Status) -> None:
        others, clock = self._load.share(), self._clock_mhz
        self._summary.conditions = Conditions(
            other_load=None if others is None else others.other_load,
            steal=None if others is None else others.steal,
            clock_mhz=statistics.median(clock) if clock else None,
            clock_start_mhz=clock[0] if clock else None,
            clock_end_mhz=clock[-1] if clock else None,
            drift=self._steps.drift(),
        )
