"""Step times: how a step is timed, and statistics of a run's steps in bounded memory.

A step's time is from "batch ready" to "parameters updated". The wait for the batch is measured
apart; metrics, logging and checkpoints are in neither. Steps on a partial last batch are not timed,
and the first timed steps are dropped as warm-up.

A list of all times would grow with every step, in every checkpoint too. So there are two summaries:
`Distribution` for quantiles, and `ThinnedSeries` for what depends on the order.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import torch

from mprun.precision import devices
from mprun.records.run_record import DataTimes, StepTimes
from mprun.train.machine.conditions import page_faults


class StepTime(NamedTuple):
    """What the clock knows of a step."""

    ms: float
    page_faults: int | None = None
    """Of the whole process during the step; None if they are not counted."""


COUNTED_FROM_MS = 2.0  # Steps that take less are short
# Counting page faults takes several microseconds: of shorter steps every eighth is counted
COUNT_EVERY = 8


class Clock:
    """Times steps; on the CPU, where a call returns when its work is done."""

    def __init__(self) -> None:
        self._times: list[StepTime] = []
        self._started = 0.0
        self._faults: int | None = None
        self._uncounted = 0
        """How many of the next steps are not counted."""

    def start(self) -> None:
        """The batch is ready."""
        if not self._uncounted:
            self._faults = page_faults()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """The parameters are updated."""
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
        """The times of the steps since the last call, in order."""
        taken, self._times = self._times, []
        return taken

    def pause(self) -> None:
        """Something other than a step follows (validation), which is not part of the next step."""


class WaitingClock(Clock):
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


class EventClock(Clock):
    """Differences of successive step-end events, which include the wait for the batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[Any, Any]] = []
        self._previous: Any = None

    def start(self) -> None:
        if self._previous is None:
            self._previous = devices.event(self._device)

    def stop(self) -> None:
        # the step's kernels still run here, and to wait for them would slow the run
        end = devices.event(self._device)
        self._pairs.append((self._previous, end))
        self._previous = end

    def take(self) -> list[StepTime]:
        taken, self._pairs = self._pairs, []
        if taken:
            taken[-1][1].synchronize()  # events of a stream are in order: the last one is enough
        return [StepTime(start.elapsed_time(end)) for start, end in taken]

    def pause(self) -> None:
        self._previous = None  # the next step begins with an event of its own


def clock_for(device: torch.device) -> Clock:
    """The clock that fits a device."""
    if device.type == "cpu":
        return Clock()
    return EventClock(device) if devices.backend(device).events else WaitingClock(device)


BIN_WIDTH = 1e-3  # Relative; a quantile is off by less
BINS_PER_E = 1 / math.log1p(BIN_WIDTH)  # Bins from a number to its e-fold
# Smaller values share a bin. From here to 1e6 there are some 35,000 bins; a run has hundreds.
LEAST = 1e-9

MAX_VALUES = 4096  # Of a thinned series. Even, because it is thinned in pairs.

# Allocators fill and kernels are selected in the first steps. A short run has few to give up.
MANY_STEPS = 100
WARMUP_MANY = 10
WARMUP_FEW = 3
MIN_IN_A_THIRD = 10  # Fewer steps give a third's median to more than a few percent


class Distribution:
    """Counts numbers from 0 on; gives their quantiles."""

    # Masson, Rim, Lee: DDSketch, VLDB 2019: bins of equal relative width bound a quantile's error

    def __init__(self, bins: Iterable[tuple[int, int, float]] = ()) -> None:
        self._bins = {key: (count, total) for key, count, total in bins}

    def add(self, value: float) -> None:
        """Count a number."""
        key = math.floor(math.log(max(value, LEAST)) * BINS_PER_E)
        count, total = self._bins.get(key, (0, 0.0))
        # the total gives the mean of the bin, which is exact where all of its values are equal
        self._bins[key] = count + 1, total + value

    def plus(self, values: Iterable[float]) -> Distribution:
        """A new one, of these numbers too."""
        both = Distribution(self.bins())
        for value in values:
            both.add(value)
        return both

    def quantiles(self, *shares: float) -> list[float | None]:
        """The numbers that these shares lie below, with linear interpolation; None of nothing."""
        rows = [self._bins[key] for key in sorted(self._bins)]
        ends = list(itertools.accumulate(count for count, _ in rows))
        if not ends:
            return [None] * len(shares)

        def at(rank: int) -> float:
            count, total = rows[bisect.bisect_right(ends, rank)]
            return total / count

        last = ends[-1] - 1
        results: list[float | None] = []
        for share in shares:
            below = math.floor(share * last)
            low, high = at(below), at(min(below + 1, last))
            results.append(low + (high - low) * (share * last - below))
        return results

    def bins(self) -> list[tuple[int, int, float]]:
        """Plain values that make the same distribution: number, count and sum of each bin."""
        return [(key, count, total) for key, (count, total) in self._bins.items()]


class ThinnedSeries:
    """An even choice of a long series, in order: one value of every `width` successive ones.

    That is all of the first 4,096 values; later one of every 2, 4, 8, ...
    """

    def __init__(self, most: int = MAX_VALUES) -> None:
        self.values: list[float] = []
        self.seen = 0
        """The length of the whole series."""
        self.width = 1
        self._most = most
        self._next = 0
        """The position of the next value that is chosen."""
        # a random one of each group: every n-th step (a checkpoint, say) may be a slow one
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        """The next value of the series."""
        if self.seen == self._next:
            self.values.append(value)
        self.seen += 1
        if self.seen % self.width == 0:
            if len(self.values) == self._most:
                pairs = zip(self.values[::2], self.values[1::2], strict=True)
                self.values = [self._random.choice(pair) for pair in pairs]
                self.width *= 2
            self._next = self.seen + self._random.randrange(self.width)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""
        values = torch.tensor(self.values, dtype=torch.float64)
        return {"values": values, "seen": self.seen, "width": self.width, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a series."""
        self.values = state["values"].tolist()
        self.seen, self.width, self._next = state["seen"], state["width"], state["next"]
        self._random.seed(self.seen)  # reproducible, without saving its state of 625 numbers


def warmup_steps(steps: int) -> int:
    """Steps left out at the start of so many: 10 of a hundred or more, else 3."""
    return min(WARMUP_FEW if steps < MANY_STEPS else WARMUP_MANY, steps)


def drift(step_ms: ThinnedSeries) -> float | None:
    """Median time of the last third of the steps over the first third's; None for few steps."""
    warmup = math.ceil(warmup_steps(step_ms.seen) / step_ms.width)  # values of the series
    times = step_ms.values[warmup:]
    third = len(times) // 3
    if third < MIN_IN_A_THIRD:
        return None
    first, last = statistics.median(times[:third]), statistics.median(times[-third:])
    return last / first if first else None


class StepStatistics:
    """Summarizes the timed steps of a run: milliseconds, waits for the batch and page faults."""

    def __init__(self) -> None:
        self._steps = 0
        self._first: list[tuple[float | None, ...]] = []
        """The steps that may turn out to be warm-up."""
        self._columns = Distribution(), Distribution(), Distribution()

    def add(self, step_ms: float, data_ms: float | None, page_faults: int | None = None) -> None:
        """One full-size step."""
        self._steps += 1
        row = step_ms, data_ms, page_faults
        if len(self._first) < WARMUP_MANY:
            self._first.append(row)
            return
        for column, value in zip(self._columns, row, strict=True):
            if value is not None:
                column.add(value)

    @property
    def warmup(self) -> int:
        """Steps left out at the start."""
        return warmup_steps(self._steps)

    def _timed(self, column: int) -> Distribution:
        """The figures of a column after the warm-up."""
        rows = self._first[self.warmup :]
        return self._columns[column].plus(x for row in rows if (x := row[column]) is not None)

    def step_times(self) -> StepTimes:
        """Statistics of step times; None if every step was warm-up."""
        p10, median, p90 = self._timed(0).quantiles(0.1, 0.5, 0.9)
        n = self._steps - self.warmup
        return StepTimes(median=median, p10=p10, p90=p90, n=n, warmup=self.warmup)

    def data_times(self) -> DataTimes:
        """Statistics of waits for the batch, over the same steps."""
        median, p90 = self._timed(1).quantiles(0.5, 0.9)
        return DataTimes(median=median, p90=p90)

    def page_faults_per_step(self) -> float | None:
        """Median page faults, over the same steps; None if they were not counted."""
        return self._timed(2).quantiles(0.5)[0]

    def samples_per_second(self, batch_size: int) -> float | None:
        """Throughput of training: batch size over median step time plus median wait."""
        step, wait = self.step_times().median, self.data_times().median
        if step is None or wait is None:
            return None
        return batch_size / (step + wait) * 1e3

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""
        columns = [column.bins() for column in self._columns]
        return {"steps": self._steps, "first": self._first, "columns": columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the statistics."""
        self._steps = state["steps"]
        # checked: a checkpoint may come from anyone
        self._first = msgspec.convert(state["first"], list[tuple[float | None, ...]])
        step_ms, data_ms, page_faults = map(Distribution, state["columns"])
        self._columns = step_ms, data_ms, page_faults
