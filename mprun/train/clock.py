"""Step time: its measurement and its statistics.

A step's time is from "batch ready" to "parameters updated". The wait for the batch is measured
apart; metrics, logging and checkpoints are in neither. Steps on a partial last batch are not timed.
The first timed steps of a run are warm-up (allocators fill, kernels are selected, caches warm):
they are dropped and counted.

On CUDA a step's kernels still run when the call that launched them returns. Waiting for them at
each step would slow the run. So an event is recorded at the end of each step, and the step's time
is the difference of successive events, which is read later and includes the wait for the batch.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple, Protocol

import torch

from mprun.doctor.heap import page_faults
from mprun.records.run_record import DataTimes, StepTimes

MANY_STEPS = 100
WARMUP_MANY = 10
WARMUP_FEW = 3
FEWEST_IN_A_THIRD = 10
"""Fewer steps give a third's median to more than a few percent."""


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


class HostClock:
    """For the CPU, where a call returns when its work is done."""

    def __init__(self) -> None:
        self._times: list[StepTime] = []
        self._started = 0.0
        self._faults: int | None = None

    def start(self) -> None:
        self._faults = page_faults()
        self._started = time.perf_counter()

    def stop(self) -> None:
        ms, faults = (time.perf_counter() - self._started) * 1e3, page_faults()
        if faults is not None and self._faults is not None:
            faults -= self._faults
        self._times.append(StepTime(ms, faults))

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


class StepStatistics:
    """Collects the timed steps of a run: milliseconds and page faults."""

    def __init__(self) -> None:
        self.step_ms: list[float] = []
        self.data_ms: list[float] = []
        self.page_faults: list[int | None] = []

    def add(self, step_ms: float, data_ms: float, page_faults: int | None = None) -> None:
        """One full-size step."""
        self.step_ms.append(step_ms)
        self.data_ms.append(data_ms)
        self.page_faults.append(page_faults)

    @property
    def warmup(self) -> int:
        """Steps left out at the start: 10 of a hundred or more, else 3."""
        few = WARMUP_FEW if len(self.step_ms) < MANY_STEPS else WARMUP_MANY
        return min(few, len(self.step_ms))

    def step_times(self) -> StepTimes:
        """Statistics of step times; None if every step was warm-up."""
        times = self.step_ms[self.warmup :]
        p10, median, p90 = quantiles(times)
        return StepTimes(median=median, p10=p10, p90=p90, n=len(times), warmup=self.warmup)

    def data_times(self) -> DataTimes:
        """Statistics of waits for the batch, over the same steps."""
        _, median, p90 = quantiles(self.data_ms[self.warmup :])
        return DataTimes(median=median, p90=p90)

    def page_faults_per_step(self) -> float | None:
        """Median page faults, over the same steps; None if they were not counted."""
        counted = [x for x in self.page_faults[self.warmup :] if x is not None]
        return statistics.median(counted) if counted else None

    def drift(self) -> float | None:
        """Median time of the last third of the steps over the first third's; None for few steps."""
        times = self.step_ms[self.warmup :]
        third = len(times) // 3
        if third < FEWEST_IN_A_THIRD:
            return None
        first, last = statistics.median(times[:third]), statistics.median(times[-third:])
        return last / first if first else None

    def samples_per_second(self, batch_size: int) -> float | None:
        """Throughput of training: batch size over median step time plus median wait."""
        step, wait = self.step_times().median, self.data_times().median
        if step is None or wait is None:
            return None
        return batch_size / (step + wait) * 1e3


def quantiles(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """10th percentile, median and 90th, with linear interpolation; None if there is no value."""
    if not values:
        return None, None, None
    if len(values) == 1:
        return values[0], values[0], values[0]
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], statistics.median(values), deciles[8]
