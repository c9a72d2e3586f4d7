"""Runs in processes of their own, which can be killed.

Starting one takes seconds, most of them spent importing torch, so one process imports it, draws the
data, and forks a child for each run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FORKING = """
import json, os, sys, time
import torch, torch._dynamo, mprun.run
from mprun.cli.main import main
from mprun.data.generated import draw

draw()

def slow(descriptor, sync=os.fsync):
    time.sleep(0.01)
    sync(descriptor)

for line in sys.stdin:
    words, cwd, environment = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ.update(environment)
        if "SLOW_DISK" in environment:
            os.fsync = slow
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 99
        try:
            status = main(words)
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forking:
    """Runs mprun in processes of their own, one at a time.

    With SLOW_DISK in its environment a process takes 10 ms to bring a file to the disk.
    """

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(
        self, words: list[str], cwd: Path, environment: Mapping[str, str] | None = None
    ) -> int:
        """Begin a run, with these variables of the environment too; its process id."""
        assert self._server.stdin is not None
        line = json.dumps([words, str(cwd), dict(environment or {})])
        self._server.stdin.write(f"{line}\n")
        self._server.stdin.flush()
        return self._read()

    def wait(self) -> int:
        """How the run ended: its status, or the negative number of the signal that killed it."""
        return self._read()

    def _read(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate(timeout=60)
