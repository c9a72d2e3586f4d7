"""Several processes of mprun at once, and a recipe whose steps wait for them.

Starting a process takes seconds, most of them spent importing torch, so one process imports it and
forks a child for each command.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.server import Server
from tests.waiting import wait_for

FORKING = """
import json, os, sys
os.environ.pop("OMP_NUM_THREADS", None)  # a study shares the cores itself
import torch, mprun.train.run, mprun.cli.compare_command, mprun.study.hydra_launch
from mprun.cli.main import main

torch.set_num_threads(1)
for line in sys.stdin:
    words, log, folder = json.loads(line)
    if not words:  # its status is asked for, once it has ended
        print(os.waitstatus_to_exitcode(os.waitpid(log, 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
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
"""

RECIPE = '''
"""A study's processes begin their first steps together; then a step waits unless it may go.

Each trial takes {free} steps at once and then one in {pause_s} s, until there is a file `go`.
So a test finds a trial under way, however busy the machine is.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

taken = 0


def wait(*, until):
    while not until():
        time.sleep(0.002)


def is_real(tensor):
    return type(tensor) is torch.Tensor and torch.is_grad_enabled()


def pause():
    global taken
    taken += 1
    mine = Path(f"met-{{os.getpid()}}")
    if {together} > 1 and not mine.exists():
        mine.touch()
        wait(until=lambda: len(list(Path().glob("met-*"))) >= {together})
    end = time.monotonic() + {pause_s}
    if taken > {free}:
        wait(until=lambda: Path("go").exists() or time.monotonic() > end)


def model():
    global taken
    taken = 0
    return nn.Linear(4, 2)


def data():
    x = torch.randn(96, 4)
    y = (x.sum(1) > 0).long()
    return {{"train": (x[:32], y[:32]), "test": (x[32:], y[32:])}}


def loss(output, batch):
    if is_real(output):
        pause()
    return cross_entropy(output, batch[1])


def correct(output, batch):
    return (output.argmax(1) == batch[1]).sum()
'''


def write_recipe(together: int) -> None:
    """Write a recipe of which so many processes meet, `waiting.py`, into the current folder."""
    text = RECIPE.format(together=together, free=10, pause_s=0.2)
    Path("waiting.py").write_text(text, encoding="utf-8")


class Crowd:
    """Processes of mprun in the current folder."""

    def __init__(self) -> None:
        self._folder = str(Path.cwd())
        self._pids: list[int] = []

    def start(self, words: Sequence[str], log: str) -> int:
        """Begin a command, whose output goes to a file; its process id."""
        pid = int(forking().ask([list(words), log, self._folder]))
        self._pids.append(pid)
        return pid

    def statuses(self) -> dict[int, int]:
        """Process id to exit status, of all, once all have ended; the negative signal if killed."""
        wait_for(lambda: not any(map(is_alive, self._pids)))
        statuses = {pid: int(forking().ask([[], pid, self._folder])) for pid in self._pids}
        self._pids.clear()
        return statuses

    def kill(self) -> None:
        """End those that still run."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        self.statuses()


@contextmanager
def a_crowd() -> Iterator[Crowd]:
    """Processes, none of which is left over."""
    crowd = Crowd()
    try:
        yield crowd
    finally:
        crowd.kill()


@functools.cache
def forking() -> Server:
    """The process that forks; it ends with this one."""
    server = Server(FORKING)
    atexit.register(server.close)
    return server


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and nobody asked about, has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def starts(study: str) -> dict[str, list[int]]:
    """A trial's name to the ids of the processes that ran it, in their order."""
    return {
        path.stem: [json.loads(line)["pid"] for line in text.splitlines()]
        for path in Path(study, ".claims").glob("*.jsonl")
        if (text := path.read_text())
    }


def running_trials(study: str, count: int) -> dict[int, str]:
    """The process ids and trials of a study, once so many have checkpoints and are under way."""
    found: dict[int, str] = {}

    def have_taken_steps() -> bool:
        found.clear()
        for name, pids in starts(study).items():
            folder = Path(study) / name
            has_checkpoint = (folder / "checkpoints" / "last.pt").exists()
            if has_checkpoint and '"running"' in (folder / "summary.json").read_text():
                found[pids[-1]] = name
        return len(found) == count

    wait_for(have_taken_steps)
    return found
