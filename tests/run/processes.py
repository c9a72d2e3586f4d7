"""Runs in processes of their own, which can be killed.

Starting one takes seconds, most of them spent importing torch, so one process imports it, draws the
data, and forks a child for each run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.server import Server

FORKING = """
import json, os, resource, signal, sys, time
import torch, mprun.train.run
from mprun.cli.main import main
from mprun.train.data import sources

sources.TRAIN_SAMPLES = 2048
sources.draw()
mprun.train.run.footprint = lambda *_: ({}, None)  # takes as long as a short run
sync, apply = os.fsync, torch.nn.Sequential.forward

def slow_sync(descriptor):
    time.sleep(0.01)
    sync(descriptor)

def deadly_sync(descriptor):
    name, _, number = os.environ["KILL_WRITING"].partition(" ")
    if name in os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")):
        os.environ["KILL_WRITING"] = f"{name} {int(number) - 1}"
        if number == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    sync(descriptor)

def ended_evaluation(self, x):
    if not self.training and "END_EVALUATION" in os.environ:
        os.kill(os.getpid(), int(os.environ.pop("END_EVALUATION")))
    return apply(self, x)

def prepare(words, cwd, environment):
    os.chdir(cwd)
    os.environ.update(environment)
    if "SLOW_DISK" in environment:
        os.fsync = slow_sync
    if "KILL_WRITING" in environment:
        os.fsync = deadly_sync
    if "END_EVALUATION" in environment:
        torch.nn.Sequential.forward = ended_evaluation
    if "FILE_LIMIT" in environment:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(environment["FILE_LIMIT"]),) * 2)
        sys.dont_write_bytecode = True  # it would be cut too
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if "OUT" in environment:
        os.dup2(os.open(environment["OUT"], os.O_WRONLY), 1)

for line in sys.stdin:
    job, pid = json.loads(line), os.fork()
    if pid == 0:
        status = 99
        try:
            prepare(*job)
            status = main(job[0])
            sys.stdout.flush()
        finally:
            os._exit(status)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forking:
    """Runs mprun in processes of their own; these variables of its environment do something to one:

    - SLOW_DISK: it takes 10 ms to bring a file to the disk.
    - KILL_WRITING="TEXT N": it dies before the Nth file whose name contains the text is written.
    - END_EVALUATION: it sends itself this signal in its first evaluation of an nn.Sequential.
    - FILE_LIMIT: no file can have more bytes.
    - OUT: the file of its standard output alone.
    """

    def __init__(self) -> None:
        self._server = Server(FORKING, OMP_NUM_THREADS="1")

    def start(
        self, words: list[str], cwd: Path, environment: Mapping[str, str] | None = None
    ) -> int:
        """Begin a run, with these variables of the environment too; its process id."""
        return int(self._server.ask((words, str(cwd), dict(environment or {}))))

    def wait(self) -> int:
        """How the run ended: its status, or the negative number of the signal that killed it."""
        return int(self._server.next_line())

    def run(self, words: list[str], cwd: Path, environment: Mapping[str, str] | None = None) -> int:
        """Begin a run and wait for its end."""
        self.start(words, cwd, environment)
        return self.wait()

    def close(self) -> None:
        self._server.close()
