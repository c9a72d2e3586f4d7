"""Records the conditions of a run, which its step times depend on: load, steal, clock, drift."""

from __future__ import annotations

import statistics
import time

from mprun.doctor.conditions import LoadMeter, clock_mhz
from mprun.records.run_record import Conditions, Status, Summary
from mprun.train.callbacks import Callback, StepLine
from mprun.train.step_statistics import ThinnedSeries, drift

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
        self._clock_mhz = ThinnedSeries()
        self._clock_ends_mhz: tuple[float, float] | None = None
        """The first reading and the last one."""
        self._read_at = -READ_CLOCK_EVERY_S
        self._step_ms = ThinnedSeries()

    def on_steps(self, lines: list[StepLine]) -> None:
        for line in lines:
            if line.timed:
                self._step_ms.add(line.step_time_ms)
        now = time.perf_counter()
        if now - self._read_at >= READ_CLOCK_EVERY_S:  # the CPU has just computed a step
            self._read_at = now
            if (reading := clock_mhz()) is not None:
                self._clock_mhz.add(reading)
                self._clock_ends_mhz = (self._clock_ends_mhz or (reading, reading))[0], reading

    def on_end(self, status: Status) -> None:
        others, clock = self._load.share(), self._clock_mhz.values
        start_mhz, end_mhz = self._clock_ends_mhz or (None, None)
        self._summary.conditions = Conditions(
            other_load=None if others is None else others.other_load,
            steal=None if others is None else others.steal,
            clock_mhz=statistics.median(clock) if clock else None,
            clock_start_mhz=start_mhz,
            clock_end_mhz=end_mhz,
            drift=drift(self._step_ms),
        )
