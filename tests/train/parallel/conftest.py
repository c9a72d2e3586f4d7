"""Shared by the tests of several processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed

from tests.train.parallel.processes import Groups

collect_ignore_glob = (
    [] if distributed.is_available() and distributed.is_gloo_available() else ["test_*.py"]
)


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    """Starts groups of processes."""
    server = Groups(tmp_path_factory.mktemp("groups"))
    yield server
    server.close()
