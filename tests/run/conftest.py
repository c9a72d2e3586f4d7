"""Shared by the tests of whole runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.run.processes import Forking


@pytest.fixture(scope="session")
def forking() -> Iterator[Forking]:
    """Runs mprun in processes of their own."""
    server = Forking()
    yield server
    server.close()
