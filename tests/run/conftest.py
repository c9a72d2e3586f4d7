"""Shared by the tests of whole runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.run.clock import Clock
from tests.run.processes import Forking


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
