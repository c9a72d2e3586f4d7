"""What tests of commands share: a process to fork from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.processes import Forking


@pytest.fixture(scope="session")
def forking() -> Iterator[Forking]:
    """Processes that need not import PyTorch: each takes seconds for that."""
    processes = Forking()
    yield processes
    processes.close()
