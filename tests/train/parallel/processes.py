"""Runs and functions in several processes that share a job.

`Groups` imports torch once and forks the processes of each group, which share what it has drawn and
composed; so a group costs half a second.
It sets what torchrun sets, and watches nobody: what a process does when another one ends is its own
doing. `torchrun` starts the real one.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mprun.train.data.sources import draw
from tests.server import ROOT, Server
from tests.waiting import PATIENCE_S, wait_for

FORKING = """
import functools, gc, importlib, json, os, sys
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, mprun.train.run
import mprun.train.assemble.speed_trial, mprun.cli.train_command, mprun.study.planned_run
import mprun.train.parallel.shards, mprun.recipes.mnist, mprun.study.report.tables
from mprun.config import compose
from mprun.train.data import sources
from mprun.study.report import plots
from tests.train.parallel import planted

drawn = torch.load(os.environ["DRAWN"], weights_only=False)
sources.draw = lambda: drawn
plots.draw = functools.partial(plots.draw, names=["difference"])

compose(["train.max_steps=1"])  # reads what is legal

@functools.cache
def composed(choices):
    try:
        compose(choices)
    except Exception:
        pass  # the processes say what is wrong

for line in sys.stdin:
    jobs, pids = json.loads(line), []
    composed(tuple(word for word in jobs[0]["words"] if "." not in word.partition("=")[0]))
    gc.collect()
    gc.freeze()  # what a process collects is its own: it would copy every page of this one
    for job in jobs:
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        os.setpgid(0, 0)
        os.chdir(job["cwd"])
        os.environ.update(job["environment"])
        for number, name in ((1, "out"), (2, "err")):
            path = f"{name}-{job['environment']['RANK']}.txt"
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        status = 99
        try:
            if job["call"]:
                module, name, arguments = job["call"]
                planted.call(getattr(importlib.import_module(module), name), arguments)
                status = 0
            else:
                status = planted.carry_out(job["words"])
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(json.dumps(pids), flush=True)
    ended = {}
    while len(ended) < len(pids):
        pid, status = os.wait()
        ended[pid] = os.waitstatus_to_exitcode(status)
    print(json.dumps([ended[pid] for pid in pids]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How a group ended."""

    statuses: list[int]
    """Of each process: its status, or the negative number of the signal that killed it."""
    out: list[str]
    err: list[str]

    @property
    def status(self) -> int:
        """The first process's."""
        return self.statuses[0]

    @property
    def errors(self) -> list[str]:
        """What all processes said on standard error, line by line."""
        return [line for text in self.err for line in text.splitlines() if line.strip()]


class Groups:
    """Starts groups of processes, one group at a time."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: an empty one, for the generated samples, which take seconds to draw."""
        torch.save(draw(), folder / "drawn.pt")
        self._server = Server(
            FORKING,
            DRAWN=str(folder / "drawn.pt"),
            OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",  # as mprun sets it before it imports torch
        )
        # A thread reads, since no `select` sees a line that is already in the stream's buffer.
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._pass_on, daemon=True).start()
        self._store: dist.TCPStore | None = None
        self.pids: list[int] = []

    def run(
        self,
        words: Sequence[str],
        processes: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> Ended:
        """Carry an mprun command out in the current folder.

        Args:
            words: the command's.
            processes: how many there are.
            environment: more variables.
        """
        self.start(words, processes, environment)
        return self.wait()

    def call(self, function: Any, *arguments: Any, processes: int = 2) -> list[Any]:
        """What `function(*arguments)` returns in each process of a gloo group."""
        call = [function.__module__, function.__qualname__, list(arguments)]
        self._begin({"call": call, "words": []}, processes, {})
        ended = self.wait()
        assert ended.statuses == [0] * processes, "\n".join(ended.errors)
        return [torch.load(f"result-{rank}.pt", weights_only=False) for rank in range(processes)]

    def start(
        self,
        words: Sequence[str],
        processes: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Begin a command; `wait` for its end."""
        self._begin({"words": list(words), "call": None}, processes, environment or {})

    def _begin(
        self,
        job: dict[str, Any],
        processes: int,
        environment: Mapping[str, str],
    ) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **environment,
        }
        jobs = [
            {
                **job,
                "cwd": str(Path.cwd()),
                "environment": {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            }
            for rank in range(processes)
        ]
        self._server.send(jobs)
        self.pids = self._read()

    def wait_until_connected(self) -> None:
        """Wait until all processes have met: before, only torchrun sees that one is gone."""
        store = self._store
        assert store is not None
        keys = [f"mprun/process/{rank}" for rank in range(len(self.pids))]
        wait_for(lambda: store.check(keys))

    def wait(self) -> Ended:
        """How the group ended; processes that do not end are killed, and the test fails."""
        try:
            statuses = self._read()
        except TimeoutError:
            for pid in self.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._read()
            texts = [path.read_text(encoding="utf-8") for path in sorted(Path.cwd().glob("???-*"))]
            raise AssertionError("the processes did not end:\n" + "\n".join(texts)) from None
        out, err = (
            [
                Path(f"{name}-{rank}.txt").read_text(encoding="utf-8")
                for rank in range(len(statuses))
            ]
            for name in ("out", "err")
        )
        return Ended(statuses, out, err)

    def _pass_on(self) -> None:
        while line := self._server.next_line():
            self._answers.put(line)

    def _read(self) -> list[int]:
        try:
            answer: list[int] = json.loads(self._answers.get(timeout=PATIENCE_S))
        except queue.Empty:
            raise TimeoutError from None
        return answer

    def close(self) -> None:
        self._server.close()


class Torchrun:
    """The real torchrun, in a process group of its own, with mprun's command beside it."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nproc-per-node=2", f"--master-port={free_port()}"),
                *("-m", "tests.train.parallel.planted", *words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                **environment,
            },
        )

    def terminate(self) -> None:
        """SIGTERM to torchrun alone."""
        self.process.terminate()

    def wait(self) -> Ended:
        """How torchrun ended; its `out` and `err` have one text for all processes."""
        try:
            out, err = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            # its processes are in sessions of their own, and may hold the pipes
            raise AssertionError(f"torchrun did not end in {PATIENCE_S:g} s") from None
        return Ended([self.process.returncode], [out], [err])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def own_errors(ended: Ended) -> list[str]:
    """The lines of mprun itself on standard error; torchrun's own report has others."""
    return [line for line in ended.errors if line.startswith("mprun: ")]
