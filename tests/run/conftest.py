"""Shared by the tests of whole runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from torch._subclasses.fake_tensor import FakeTensor

from mprun.train.data import Batch
from mprun.train.loop import StepResult, Trainer
from tests.run.clock import Clock
from tests.run.processes import Forking

AtStep = Callable[[int, Callable[[], None]], None]


@pytest.fixture(scope="session")
def forking() -> Iterator[Forking]:
    """Runs mprun in processes of their own."""
    server = Forking()
    yield server
    server.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of this process from now on, by which a step takes some hundredths of a second."""
    made = Clock(tick_s=0.01)
    monkeypatch.setattr(time, "perf_counter", made)
    monkeypatch.setattr(time, "sleep", made.sleep)
    return made


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """Have something happen, once, before a step is taken."""
    plain = Trainer.optimizer_step

    def arrange(n: int, what: Callable[[], None]) -> None:
        left = [what]

        def step(self: Trainer, batch: Batch) -> StepResult:
            measured = isinstance(batch.parts[0].inputs[0], FakeTensor)  # the footprint's one step
            if self.step == n - 1 and not measured and left:
                left.pop()()
            return plain(self, batch)

        monkeypatch.setattr(Trainer, "optimizer_step", step)

    return arrange
