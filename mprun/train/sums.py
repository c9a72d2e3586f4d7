"""The figures of steps and evaluated batches: read off the device, added up, met by all processes.

readback    the scalars of each step, on the CPU at once, on an accelerator many together
Sums        means over the samples of an epoch or a data set
StepSums    the figures of steps over all processes, of which each knows its own samples' loss
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mprun.errors import RunFailedError
from mprun.precision import devices
from mprun.precision.nested import all_tensors, map_tensors
from mprun.precision.policy import dtype_name
from mprun.recipe import Recipe
from mprun.records.run_record import Number, Scores
from mprun.train.data import Batch
from mprun.train.loss_terms import PREFIX, shown
from mprun.train.parallel.ranks import Ranks


class StepMetrics(NamedTuple):
    """The metrics of a step or an evaluated batch."""

    loss: float | None  # None for an evaluated batch without a loss
    correct: int | None = None
    loss_scale: float = 1.0
    skipped: bool = False
    parts: Mapping[str, float] = MappingProxyType({})  # The named parts of the loss


class Scalars(NamedTuple):
    """The same on the device; None for what does not apply."""

    loss: Tensor | None
    correct: Tensor | None = None
    loss_scale: Tensor | None = None
    skipped: Tensor | None = None
    parts: Mapping[str, Tensor] = MappingProxyType({})


def _metrics(read: Any) -> StepMetrics:
    """The metrics of `Scalars` with a number in place of each tensor."""
    count = None if read.correct is None else int(read.correct)
    scale = 1.0 if read.loss_scale is None else read.loss_scale
    return StepMetrics(read.loss, count, scale, bool(read.skipped), read.parts)


class MetricReadback:
    """Collects the scalars of each step, and reads them at once."""

    def __init__(self) -> None:
        self._metrics: list[StepMetrics] = []

    @property
    def full(self) -> bool:
        """Whether `take` must be called before the next step."""
        return False

    def put(self, scalars: Scalars) -> None:
        """Add a step's scalars."""
        # On the CPU they are computed when the step returns. Thousands of tiny tensors between
        # large ones would make the allocator return memory and fault it in again at every step
        # (measured: 30 to 50 page faults a step on `linear`).
        *own, parts = scalars
        read: list[Any] = [x if x is None else x.item() for x in own]
        read.append({k: x.item() for k, x in parts.items()})
        self._metrics.append(_metrics(Scalars._make(read)))

    def take(self) -> list[StepMetrics]:
        """The metrics of the steps since the last call, in order."""
        taken, self._metrics = self._metrics, []
        return taken


class DeviceReadback(MetricReadback):
    """For an accelerator, where reading a scalar makes the host wait: read together, later.

    After `capacity` steps they must be read.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._steps: list[Scalars] = []

    @property
    def full(self) -> bool:
        return len(self._steps) == self._capacity

    def put(self, scalars: Scalars) -> None:
        # copies in float64, which holds every count and every float32 exactly
        copies: Scalars = map_tensors(lambda x: x.detach().double().reshape(()), scalars)
        self._steps.append(copies)

    def take(self) -> list[StepMetrics]:
        steps, self._steps = self._steps, []
        waiting = all_tensors(steps)
        numbers = iter(torch.stack(waiting).tolist() if waiting else ())
        return [_metrics(map_tensors(lambda _: next(numbers), step)) for step in steps]


def readback_for(device: torch.device) -> MetricReadback:
    """The readback for a device."""
    known = devices.backend(device)
    # without float64 (MPS), counts above 2^24 would not be exact in one row with losses
    return DeviceReadback() if known.events and known.float64 else MetricReadback()


NO_SCORES = Scores(loss=None, accuracy=None)


def count_correct(recipe: Recipe, outputs: Sequence[Any], batch: Batch) -> Tensor | None:
    """The samples of a batch that `recipe.correct` counts as right; None for a regression.

    Raises:
        RunFailedError: it is something else. The range of the number is checked when it is read
            (`Sums.add`), so that nothing waits for the device here.
    """
    counts = [
        _checked(recipe.correct(output, part.content), part.size)
        for output, part in zip(outputs, batch.parts, strict=True)
    ]
    known = [count for count in counts if count is not None]
    # begins with a tensor: `0 + x` would be a kernel more in each step
    return sum(known[1:], known[0]) if known else None


def _checked(correct: Any, size: int) -> Tensor | None:
    """A user's code may return anything."""
    if correct is None:
        return None
    is_scalar = isinstance(correct, Tensor) and correct.numel() == 1
    if is_scalar and not (correct.is_floating_point() or correct.is_complex()):
        return cast(Tensor, correct)
    text = f"{correct.item():g} ({dtype_name(correct.dtype)})" if is_scalar else shown(correct)
    raise RunFailedError(not_a_count(text, size))


def not_a_count(received: str, size: int) -> str:
    """The message for a recipe whose `correct` does not count the `size` samples of a batch."""
    return (
        f"accuracy: the recipe's correct returned {received} for a batch of {size:,} samples; it "
        f"must return the number of samples that are right, an integer scalar from 0 to {size:,}: "
        "count a sample with several targets once; or, for the share of right tokens, replace "
        'correct by METRIC = ("accuracy", "max") and a function metrics() that returns '
        '{"accuracy": mprun.metrics.Accuracy()}; or judge by the loss '
        '(METRIC = ("loss", "min"), and correct returns None)'
    )


def with_metrics(scores: Scores, values: Mapping[str, Number | None]) -> Scores:
    """`scores` with the values of the recipe's metrics; one called accuracy is the accuracy."""
    if not values:
        return scores
    accuracy = scores.accuracy
    # a metric in percent, say, stays a metric: the record's accuracy is a share
    if (own := values.get("accuracy")) is not None and 0 <= float(own) <= 1:
        accuracy = float(own)
    return replace(scores, accuracy=accuracy, metrics={**(scores.metrics or {}), **values})


class Sums:
    """Sums over the samples of an epoch, for their means; epoch 0 means none.

    A mean loss is weighted by what the recipe counts, an accuracy by samples.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.loss = 0.0
        self.correct: int | None = None
        self.samples = 0
        self.weight = 0.0
        self.parts: dict[str, float] = {}

    def add_all(self, metrics: list[StepMetrics], sizes: list[tuple[int, float]]) -> None:
        """Add batches of these samples and weights; empties `sizes`."""
        for batch, (size, weight) in zip(metrics, sizes, strict=True):
            self.add(batch, size, weight)
        sizes.clear()

    def add(self, metrics: StepMetrics, size: int, weight: float | None = None) -> None:
        """Add a batch of `size` samples, unless its step was skipped; `weight` is that of its loss.

        Raises:
            RunFailedError: the number of right samples is not from 0 to `size`.
        """
        if metrics.skipped:
            return
        weight = size if weight is None else weight
        self.samples += size
        if metrics.loss is not None and weight:  # a mean over nothing is NaN
            self.loss += metrics.loss * weight
            self.weight += weight
            for name, part in metrics.parts.items():
                self.parts[name] = self.parts.get(name, 0.0) + part * weight
        if metrics.correct is not None:
            if not 0 <= metrics.correct <= size:
                raise RunFailedError(not_a_count(f"{metrics.correct:,}", size))
            self.correct = (self.correct or 0) + metrics.correct

    def add_up(self, ranks: Ranks) -> None:
        """Add the sums of all processes up; each has seen other samples."""
        every = ranks.gather(self)
        self.loss = sum(x.loss for x in every)
        self.weight = sum(x.weight for x in every)
        self.samples = sum(x.samples for x in every)
        self.correct = _sum_of_counts([x.correct for x in every])
        self.parts = _sums_by_name([x.parts for x in every])

    def scores(self) -> Scores:
        """The means."""
        if not self.samples:
            return NO_SCORES
        accuracy = None if self.correct is None else self.correct / self.samples
        if not self.weight:
            return Scores(loss=None, accuracy=accuracy)
        parts: dict[str, Number | None] | None = None
        if self.parts:
            parts = {f"{PREFIX}{name}": part / self.weight for name, part in self.parts.items()}
        return Scores(loss=self.loss / self.weight, accuracy=accuracy, metrics=parts)

    def state_dict(self) -> dict[str, Any]:
        """The sums, as part of a checkpoint; the parts only where the loss has some."""
        return {k: v for k, v in vars(self).items() if k != "parts" or v}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the sums of a checkpoint."""
        vars(self).update({"parts": {}, **state})
        self.parts = dict(self.parts)  # a copy: `add` would change the checkpoint


EVERY_S = 0.25  # Losses are read and lines are written at least this often, if steps are shorter
MAX_STEPS = 1000  # Below the 1,024 steps that a `DeviceReadback` holds
# The number of steps grows by this factor at most: the first steps of a process are slow
GROWTH = 4


class StepSums:
    """One process: its figures are the run's."""

    def __init__(self) -> None:
        self._met_at = time.perf_counter()

    def restart(self) -> None:
        """Steps begin now."""
        self._met_at = time.perf_counter()

    def is_due(self, stop: bool) -> bool:
        """After each step: whether it is time to report the steps; a stop is reported at once."""
        return stop or time.perf_counter() - self._met_at > EVERY_S

    def over_processes(
        self, steps: Sequence[StepMetrics], stop: bool
    ) -> tuple[list[StepMetrics], bool]:
        """The figures of all processes since the last time, and whether any is asked to stop."""
        self._met_at = time.perf_counter()
        return list(steps), stop

    def after_fault(self, report: Callable[[], None]) -> None:
        """Report the last steps, if the fault has left something to read."""
        with suppress(Exception):
            report()


class ProcessStepSums(StepSums):
    """One of several processes; all meet after an agreed number of steps, of about `EVERY_S`."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._taken = 0
        self._due = 1

    def is_due(self, stop: bool) -> bool:
        self._taken += 1
        # not by its own clock: at every step, the processes would have to agree, and wait
        return self._taken >= self._due

    def over_processes(
        self, steps: Sequence[StepMetrics], stop: bool
    ) -> tuple[list[StepMetrics], bool]:
        took_s = max(time.perf_counter() - self._met_at, 1e-6)  # a divisor
        wanted = min(MAX_STEPS, max(1, self._taken) * min(GROWTH, EVERY_S / took_s))
        own = [(step.loss or 0.0, step.correct, dict(step.parts)) for step in steps]
        stops, every_wanted, every = zip(*self._ranks.gather((stop, wanted, own)), strict=True)
        # the mean of what the processes want: the same number in all of them
        self._due, self._taken = max(1, int(sum(every_wanted) / self._ranks.size)), 0
        summed = []
        for step, figures in zip(steps, zip(*every, strict=True), strict=True):
            losses, counts, parts = zip(*figures, strict=True)
            loss, names = _as_one(losses), _sums_by_name(parts)
            named = {name: _as_one([own.get(name, 0.0) for own in parts]) for name in names}
            summed.append(step._replace(loss=loss, correct=_sum_of_counts(counts), parts=named))
        self._met_at = time.perf_counter()
        return summed, any(stops)

    def after_fault(self, report: Callable[[], None]) -> None:
        pass  # the other processes would have to be met, which may be gone


def _sum_of_counts(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _sums_by_name(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for own in parts for name in own)
    return {name: sum(own.get(name, 0.0) for own in parts) for name in names}


def _float32(value: float) -> float:
    """Rounded to float32, as the loss of one process is."""
    return torch.tensor(value, dtype=torch.float32).item()


def _as_one(losses: Sequence[float]) -> float:
    """Their sum, in float32 if all are float32's: in `precision=fp64` they have more digits."""
    total = sum(losses)
    return _float32(total) if all(x == _float32(x) for x in losses if x == x) else total


def step_sums(ranks: Ranks) -> StepSums:
    """What adds up figures over these processes."""
    return StepSums() if ranks.size == 1 else ProcessStepSums(ranks)
