"""The wall time of a run, by what it is spent on.

A stopwatch is always in exactly one category, so the categories sum to the wall time. `TimeLimit`
ends training in time for the last evaluation.

    start_up     until the first step: imports, configuration, data, model, memory of a step
    data         waits for batches, which include drawing the order of an epoch
    compute      steps: forward, backward, update
    metrics      reading losses and counts of right samples
    evaluation   validation and test
    logging      records, loggers, progress
    checkpoints  collecting and writing states

On CUDA the wait for the device shows where the host waits for a result: in `metrics` and
`evaluation`, which read losses, and in `compute` only when the queue of the device is full.
"""

from __future__ import annotations

import math
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
    """Counts a run's seconds in one category at a time, at first in `start_up`.

    `started_at` is the `time.perf_counter` of the start, or None for now.
    """

    def __init__(self, started_at: float | None = None) -> None:
        self.started_at = time.perf_counter() if started_at is None else started_at
        self._since, self._category = self.started_at, "start_up"
        self._seconds = {field.name: 0.0 for field in fields(TimeBudget)}
        self._earlier_s = 0.0

    def switch(self, category: str) -> float:
        """Begin a category, which ends the current one; the `time.perf_counter` of now."""
        now = time.perf_counter()  # a fraction of a microsecond: each step affords three
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
    """The `time.perf_counter` at which this process was started; else that of this import."""
    with suppress(Exception):  # no /proc, or one of another form
        text = Path("/proc/self/stat").read_text(encoding="utf-8")
        ticks = int(text.rpartition(")")[2].split()[19])  # field 22; a name may contain spaces
        # in ticks of 10 ms since the boot, sleep included
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        now = time.perf_counter()
        if now - IMPORTED_AT <= age_s <= MAX_START_S:
            return now - age_s
    return IMPORTED_AT


EVALUATION_SHARE = 0.5  # Evaluation after training gets at most this share of the time


class TimeLimit:
    """When training ends, so that a run takes about `train.max_time_s`.

    The limit covers all that the user waits for, from the start-up to the last score. Evaluation of
    the `evaluated` samples is expected to take as long for each as the quickest step. Without a
    limit `limit_s` is None.
    """

    def __init__(self, limit_s: float | None, watch: Stopwatch, evaluated: int) -> None:
        self._spent_before_s = 0.0
        self._limit_s = math.inf if limit_s is None else limit_s
        self._watch, self._evaluated = watch, evaluated
        self._ends_at = self._room_s = math.inf
        self._step_s = self._sample_s = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return math.isfinite(self._limit_s)

    @property
    def spent_s(self) -> float:
        """Seconds of the limit that are spent: all of them when training ended by it."""
        spent_s = self._spent_before_s + self._watch.elapsed_here_s
        # a run that ended at its limit takes no further step when it is resumed with the same one
        return max(spent_s, self._limit_s) if self.is_training_over() else spent_s

    def begin(self, spent_before_s: float) -> None:
        """Start-up is over: set the end; `spent_before_s` is `spent_s` of a run that is resumed."""
        self._spent_before_s = spent_before_s
        if math.isinf(self._limit_s):
            return
        left_s = self._limit_s - spent_before_s
        # a long start-up cannot use up the limit: half of it stays for training and evaluation
        self._room_s = max(left_s - self._watch.elapsed_here_s, left_s / 2)
        self._ends_at = time.perf_counter() + self._room_s

    def add_step(self, seconds: float, samples: int) -> None:
        """A step on so many samples took this long: another one must fit in."""
        sample_s = seconds / max(1, samples)
        self._step_s, self._sample_s = seconds, min(self._sample_s or sample_s, sample_s)

    def is_training_over(self) -> bool:
        """Whether the time for training is up."""
        evaluation_s = min(self._evaluated * self._sample_s, EVALUATION_SHARE * self._room_s)
        return time.perf_counter() + self._step_s + evaluation_s >= self._ends_at
