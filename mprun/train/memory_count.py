"""Counts the memory of a step, after the first steps of a run.

The count runs a step on fake tensors, whose import takes longer than the rest of a start. So it
comes after the first steps: a run trains earlier, and a step that fails does so at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from mprun.records.run_record import Status, Summary
from mprun.train.callbacks import Callback, StepLine
from mprun.train.stopwatch import Stopwatch


class MemoryCount(Callback):
    """Sets `memory_bytes` of a summary, once.

    Args:
        summary: the run's.
        count: gives bytes by category, and touches nothing of the run; it takes the seconds of the
            shortest step so far, None where no step was timed.
        watch: counts the run's seconds; these belong to its start-up.
    """

    def __init__(
        self, summary: Summary, count: Callable[[float | None], Mapping[str, int]], watch: Stopwatch
    ) -> None:
        self._summary, self._count, self._watch = summary, count, watch
        self._done = False

    def on_steps(self, lines: list[StepLine]) -> None:
        self._once(min((line.step_time_ms / 1e3 for line in lines), default=None))

    def on_end(self, status: Status) -> None:
        if status == "failed":  # for want of memory, perhaps
            self._once(None)

    def _once(self, step_s: float | None) -> None:
        if self._done:
            return
        self._done = True
        with self._watch.during("start_up"):
            self._summary.memory_bytes = replace(self._summary.memory_bytes, **self._count(step_s))
