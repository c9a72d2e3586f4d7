"""The wall time of a run, by what it is spent on.

A run is slower than its steps. Data, evaluation, metrics, logging, checkpoints and the start-up
take time that a step time does not show, and time that nobody measures grows unnoticed. So a
stopwatch is always in exactly one category. Each change of category adds the time since the last
change to the category that ends. So the categories sum to the wall time by construction. A change
costs a fraction of a microsecond, so each step can afford three.

    start_up     until the first step: imports, configuration, data, model, memory of a step
    data         waits for batches, which include drawing the order of an epoch
    compute      steps: forward, backward, update
    metrics      reading losses and counts of right samples
    evaluation   validation and test
    logging      records, loggers, progress
    checkpoints  collecting and writing states

On CUDA a call returns before the device has computed. The wait for the device shows where the
host waits for a result: in `metrics` and `evaluation`, which read losses, and in `compute` only
when the queue of the device is full. The step times of the record do not depend on this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mprun.records.run_record import TimeBudget

IMPORTED_AT = time.perf_counter()
MAX_START_S = 3600.0  # A process that is older when it begins its run did something else before


class Stopwatch:
    """Counts the seconds of a run in one category at a time, at first in `start_up`.

    Args:
        started_at: the `time.perf_counter` of the start, or None for now.
    """

    def __init__(self, started_at: float | None = None) -> None:
        self.started_at = time.perf_counter() if started_at is None else started_at
        self._since, self._category = self.started_at, "start_up"
        self._seconds = {field.name: 0.0 for field in fields(TimeBudget)}
        self._earlier_s = 0.0

    def switch(self, category: str) -> float:
        """Begin a category, which ends the current one; the `time.perf_counter` of now."""
        now = time.perf_counter()
        self._seconds[self._category] += now - self._since
        self._category, self._since = category, now
        return now

    @contextmanager
    def during(self, category: str) -> Iterator[None]:
        """Count the code inside in a category, then return to the one before."""
        before = self._category
        self.switch(category)
        try:
            yield
        finally:
            self.switch(before)

    @property
    def elapsed_here_s(self) -> float:
        """Seconds in this process."""
        return time.perf_counter() - self.started_at

    @property
    def after_start_up_s(self) -> float:
        """Seconds of the whole run, without its start-up."""
        elapsed_s, budget = self.read()
        return elapsed_s - budget.start_up

    def read(self) -> tuple[float, TimeBudget]:
        """Seconds of the whole run, and the same by category, taken at the same moment."""
        now = self.switch(self._category)
        return self._earlier_s + now - self.started_at, TimeBudget(**self._seconds)

    def state_dict(self) -> dict[str, Any]:
        """The seconds so far, as part of a checkpoint."""
        elapsed_s, budget = self.read()
        return {"elapsed_s": elapsed_s, "time_budget_s": asdict(budget)}

    def resume(self, elapsed_s: float, budget_s: Mapping[str, float]) -> None:
        """Add the seconds of the run before it was resumed, and the same by category."""
        self._earlier_s += elapsed_s
        for category, seconds in budget_s.items():
            self._seconds[category] += seconds


def process_start() -> float:
    """The `time.perf_counter` at which this process was started.

    Linux has the start in units of 10 ms. Where it is not known, this is the import of this module.
    """
    with suppress(Exception):  # no /proc, or one of another form
        text = Path("/proc/self/stat").read_text(encoding="utf-8")
        ticks = int(text.rpartition(")")[2].split()[19])  # field 22; a name may contain spaces
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        now = time.perf_counter()
        if now - IMPORTED_AT <= age_s <= MAX_START_S:
            return now - age_s
    return IMPORTED_AT
