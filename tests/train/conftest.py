"""Runs in processes that have imported nothing but what a run imports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server

FORKING = """
import json, os, sys
import mprun.train.run
from mprun.cli.main import main
from mprun.train.data import sources

sources.TRAIN_SAMPLES = sources.TEST_SAMPLES = 1000
mprun.train.run.QUICK_STEP_S = float("inf")  # however busy the machine is
out = sys.stdout
for line in sys.stdin:
    words, cwd = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.chdir(cwd)
        sys.stdout = sys.stderr = open("log.txt", "w")
        status = main(words)
        print(json.dumps([status, sorted(sys.modules)]), file=out, flush=True)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""


class Fresh:
    """Imports a run's modules once, and copies that process for each run."""

    def __init__(self) -> None:
        self._server = Server(FORKING)

    def imported(self, words: list[str], cwd: Path) -> set[str]:
        """The modules a process has imported after a run."""
        status, modules = json.loads(self._server.ask([words, str(cwd)]))
        assert status == 0, (cwd / "log.txt").read_text(encoding="utf-8")
        return set(modules)

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    server = Fresh()
    yield server
    server.close()
