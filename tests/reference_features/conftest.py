"""Shared by the tests of the rows."""

from __future__ import annotations

import pytest


@pytest.fixture
def one_traced_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes one step: the others are for the times, which no row looks at."""
    monkeypatch.setattr("mprun.inspect.trace.WARMUP", 0)
    monkeypatch.setattr("mprun.inspect.trace.REPEATS", 1)
