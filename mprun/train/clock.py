"""Step time: its measurement.

A step's time is from "batch ready" to "parameters updated". The wait for the batch is measured
apart; metrics, logging and checkpoints are in neither. Steps on a partial last batch are not timed.

On an accelerator a step's kernels still run when the call that launched them returns. Waiting for
them at each step would slow the run. So an event is recorded at the end of each step, and the
step's time is the difference of successive events, which is read later and includes the wait for
the batch. Where a device has no events, each step is waited for.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import torch

from mprun import devices
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


class WaitingClock(HostClock):
    """For a device without events: the host waits for each step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def start(self) -> None:
        devices.synchronize(self._device)
        super().start()

    def stop(self) -> None:
        devices.synchronize(self._device)
        super().stop()


class EventClock:
    """Differences of successive step-end events, without a synchronization per step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[Any, Any]] = []
        self._previous: Any = None

    def start(self) -> None:
        if self._previous is None:
            self._previous = devices.event(self._device)

    def stop(self) -> None:
        end = devices.event(self._device)
        self._pairs.append((self._previous, end))
        self._previous = end

    def take(self) -> list[StepTime]:
        taken, self._pairs = self._pairs, []
        if taken:
            taken[-1][1].synchronize()
        return [StepTime(start.elapsed_time(end)) for start, end in taken]

    def pause(self) -> None:
        self._previous = None


def clock_for(device: torch.device) -> Clock:
    """The clock that fits a device."""
    if device.type == "cpu":
        return HostClock()
    return EventClock(device) if devices.backend(device).events else WaitingClock(device)
