"""Several processes of mprun at once.

Starting one takes seconds, most of them spent importing torch, so one process imports it and forks
a child for each command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import PATIENCE_S, wait_for

FORKING = """
import json, os, sys
import torch, mprun.run, mprun.experiments.study_worker, mprun.report.html, mprun.report.plots
from mprun.cli.main import main

torch.set_num_threads(1)
for line in sys.stdin:
    words, log = json.loads(line)
    pid = os.fork()
    if pid == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = 99
        try:
            status = main(words)
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(pid, flush=True)
while True:
    try:
        pid, status = os.wait()
    except ChildProcessError:
        break
    print(pid, os.waitstatus_to_exitcode(status), flush=True)
"""


class Crowd:
    """Processes of mprun in the current folder."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, words: Sequence[str], log: str) -> int:
        """Begin a command, whose output goes to a file; its process id."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{json.dumps([list(words), log])}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def statuses(self) -> dict[int, int]:
        """Process id to exit status, of all, once all have ended; the negative signal if killed."""
        output, _ = self._server.communicate(timeout=PATIENCE_S)
        return {int(pid): int(status) for pid, status in map(str.split, output.splitlines())}


def starts(study: str) -> dict[str, list[int]]:
    """A trial's name to the ids of the processes that ran it, in their order."""
    return {
        path.stem: [json.loads(line)["pid"] for line in text.splitlines()]
        for path in Path(study, ".claims").glob("*.jsonl")
        if (text := path.read_text())
    }


def running_trial(study: str, pid: int) -> str:
    """The trial that a process runs, once it has taken steps; its name."""
    names: list[str] = []

    def has_taken_steps() -> bool:
        names[:] = [
            name
            for name, pids in starts(study).items()
            if pids[-1] == pid
            and (Path(study) / name / "checkpoints" / "last.pt").exists()
            and '"running"' in (Path(study) / name / "summary.json").read_text()
        ]
        return bool(names)

    wait_for(has_taken_steps)
    return names[0]
