"""The figures of steps over all processes: each process knows the loss of its own samples.

To add them up at every step would make the processes wait for each other once more in a step. So
each keeps its own figures, and all of them meet after a number of steps that takes about `EVERY_S`,
on which they agree each time. There they also learn whether one of them is asked to stop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from mprun.parallel.ranks import Ranks
from mprun.train.sums import StepMetrics

EVERY_S = 0.25
"""Losses are read and lines are written at least this often, if steps are shorter."""
MAX_STEPS = 1000
GROWTH = 4
"""The number of steps grows by this factor at most: the first steps of a process are slow."""


class StepSums:
    """One process: its figures are the run's."""

    is_alone = True
    """Whether it can report its steps after a fault, where others cannot be met any more."""

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
        """Meet the other processes.

        Args:
            steps: this process's figures of the steps since the last time.
            stop: whether it is asked to stop.

        Returns:
            The figures of all processes together, and whether any is asked to stop.
        """
        self._met_at = time.perf_counter()
        return list(steps), stop


class ProcessStepSums(StepSums):
    """One of several processes."""

    is_alone = False

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        self._taken = 0
        self._due = 1
        self._names: tuple[str, ...] = ()
        """Of the parts of the loss, in the order in which they are added up."""

    def is_due(self, stop: bool) -> bool:
        self._taken += 1
        return self._taken >= self._due

    def over_processes(
        self, steps: Sequence[StepMetrics], stop: bool
    ) -> tuple[list[StepMetrics], bool]:
        took_s = max(time.perf_counter() - self._met_at, 1e-6)
        wanted = min(MAX_STEPS, max(1, self._taken) * min(GROWTH, EVERY_S / took_s))
        is_new = any(name not in self._names for step in steps for name in step.parts)
        sums = self._sums(steps, stop, wanted, is_new)
        if sums[1]:  # some process has a part of the loss that others may not know
            own = dict.fromkeys((*self._names, *(name for step in steps for name in step.parts)))
            every = self._ranks.gather([*own])
            self._names = tuple(dict.fromkeys(name for names in every for name in names))
            sums = self._sums(steps, stop, wanted, is_new=False)
        stops, _, wanted, *numbers = sums
        self._due, self._taken = max(1, int(wanted / self._ranks.size)), 0
        rows = torch.tensor(numbers, dtype=torch.float64).view(len(steps), 3 + len(self._names))
        losses = rows.float().tolist()
        summed = [
            self._step(own, loss, round(count) if known else None, parts)
            for own, (_, count, known, *_), (loss, _, _, *parts) in zip(
                steps, rows.tolist(), losses, strict=True
            )
        ]
        self._met_at = time.perf_counter()
        return summed, bool(stops)

    def _sums(
        self, steps: Sequence[StepMetrics], stop: bool, wanted: float, is_new: bool
    ) -> list[float]:
        """In float64, which holds every count and every float32 exactly."""
        numbers = [float(stop), float(is_new), wanted]
        for step in steps:
            counted = step.correct is not None
            numbers += [step.loss or 0.0, float(step.correct or 0), float(counted)]
            numbers += [step.parts.get(name, 0.0) for name in self._names]
        return self._ranks.totals(numbers)

    def _step(
        self, own: StepMetrics, loss: float, correct: int | None, parts: Sequence[float]
    ) -> StepMetrics:
        named = dict(zip(self._names, parts, strict=True))
        return own._replace(loss=loss, correct=correct, parts=named)


def step_sums(ranks: Ranks) -> StepSums:
    """What adds up figures over these processes."""
    return StepSums() if ranks.size == 1 else ProcessStepSums(ranks)
