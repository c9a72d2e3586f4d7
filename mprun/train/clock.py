"""Step time: its measurement.

A step's time is from "batch ready" to "parameters updated". The wait for the batch is measured
apart; metrics, logging and checkpoints are in neither. Steps on a partial last batch are not timed.

On CUDA a step's kernels still run when the call that launched them returns. Waiting for them at
each step would slow the run. So an event is recorded at the end of each step, and the step's time
is the difference of successive events, which is read later and includes the wait for the batch.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import torch

from mprun.doctor.heap import page_faults


class StepTime(NamedTuple):
    """What the clock knows of a step."""

    ms: float
    page_faults: int | None = None
    """Of the whole process during the step; None if they are not counted."""


class Clock(Protocol):
    """Times steps."""

    def start(self) -> None:
        """The batch is ready."""

    def stop(self) -> None:
        """The parameters are updated."""

    def take(self) -> list[StepTime]:
        """The times of the steps since the last call, in order."""

    def pause(self) -> None:
        """Something other than a step follows (validation), which is not part of the next step."""


COUNTED_FROM_MS = 2.0
COUNT_EVERY = 8
"""Counting page faults takes several microseconds: of shorter steps every eighth is counted."""


class HostClock:
    """For the CPU, where a call returns when its work is done."""

    def __init__(self) -> None:
        self._times: list[StepTime] = []
        self._started = 0.0
        self._faults: int | None = None
        self._uncounted = 0
        """How many of the next steps are not counted."""

    def start(self) -> None:
        if not self._uncounted:
            self._faults = page_faults()
        self._started = time.perf_counter()

    def stop(self) -> None:
        ms = (time.perf_counter() - self._started) * 1e3
        if self._uncounted:
            self._uncounted -= 1
            self._times.append(StepTime(ms))
            return
        faults = page_faults()
        if faults is not None and self._faults is not None:
            faults -= self._faults
        self._times.append(StepTime(ms, faults))
        self._uncounted = COUNT_EVERY - 1 if ms < COUNTED_FROM_MS else 0

    def take(self) -> list[StepTime]:
        taken, self._times = self._times, []
        return taken

    def pause(self) -> None:
        pass


class CudaClock:
    """For CUDA: differences of successive step-end events, without a synchronization per step."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._previous: Any = None

    def start(self) -> None:
        if self._previous is None:
            self._previous = self._event()

    def stop(self) -> None:
        end = self._event()
        self._pairs.append((self._previous, end))
        self._previous = end

    def take(self) -> list[StepTime]:
        taken, self._pairs = self._pairs, []
        if taken:
            taken[-1][1].synchronize()
        return [StepTime(start.elapsed_time(end)) for start, end in taken]

    def pause(self) -> None:
        self._previous = None

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_for(device: torch.device) -> Clock:
    """The clock that fits a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
