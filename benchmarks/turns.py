"""Processes that train in turns: one works, the others sleep, and drift of the machine hits all.

Two libraries in one process share a heap, an allocator's state, threads and imports, so none of
them is measured as a user has it. Two processes one after the other see different machines: clock
frequency and other load change within minutes by more than the libraries differ. So each subject
has a process of its own, and the processes take turns, block by block of a few steps, in an order
that reverses from round to round (A B C, C B A, ...): a steady drift cancels. A turn is a time,
not a number of steps, so that the whole takes about as long on a slow machine as on a fast one.

A process imports what it needs once and then waits (`serve`). For each task it forks, so that every
task begins with a fresh heap and its own peak memory, and pays for no import again. The fork calls
`Turns` after each of its steps. It reports a line of JSON where a block ends and sleeps in a read
until the parent writes `go`. The price is that a process wakes with cold caches at the start of its
block; all pay it alike.

Waiting must cost nothing. OpenMP's threads may spin for a moment after a parallel region; each
report therefore has the processor time that passed in the wait before it.

Peak memory is the kernel's `VmHWM`, which begins at zero where a program is executed. `ru_maxrss`
is the same figure, but on Linux it begins with the memory of the process that started the child:
with a parent that has imported torch every child would seem to need 600 MB.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from benchmarks.alternate import interval

PIPES = "MPRUN_BENCH_PIPES"
"""Environment variable of a child: the descriptors it reads commands from and reports to."""
TIMEOUT_S = 240.0
"""A child that is silent for longer has failed."""
FAILED = {"failed": True}
"""The report of a task that ended by itself; its last line of output is in the log."""


def serve(train: Callable[[str, Turns], None], seconds: float) -> None:
    """The child's side: say that all is imported, then train each task that comes, in a fork.

    No parallel region may have run before: OpenMP's threads do not survive a fork.

    Args:
        train: trains a task for ever, and calls its `Turns` after each step.
        seconds: length of a turn.
    """
    read, write = map(int, os.environ[PIPES].split(","))
    commands, reports = os.fdopen(read), os.fdopen(write, "w")
    _send(reports, {})
    while task := commands.readline():
        process = os.fork()
        if not process:
            try:
                train(task.strip(), Turns(seconds, commands, reports))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        _, status = os.waitpid(process, 0)
        if status:
            _send(reports, FAILED)


def _send(reports: TextIO, figures: Mapping[str, float]) -> None:
    reports.write(json.dumps(figures) + "\n")
    reports.flush()


class Turns:
    """Called after each optimizer step, returns when the next may begin.

    Args:
        seconds: length of a turn; it ends with the first step that ends later.
        commands: where the parent writes `go`; anything else, or its end, ends this process.
        reports: where a line per block is written.
    """

    def __init__(self, seconds: float, commands: TextIO, reports: TextIO) -> None:
        self._seconds = seconds
        self._commands, self._reports = commands, reports
        self._started = False
        self._steps = 0
        self._start_s = self._waited_s = self._waited_cpu_s = 0.0
        self._faults = 0

    def __call__(self) -> None:
        if not self._started:  # the first step: a report without figures
            self._started = True
            _send(self._reports, {})
            self._wait()
            return
        self._steps += 1
        took_s = time.perf_counter() - self._start_s
        if took_s >= self._seconds:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
            _send(
                self._reports,
                {
                    "steps": self._steps,
                    "took_s": took_s,
                    "faults": faults,
                    "waited_s": self._waited_s,
                    "waited_cpu_s": self._waited_cpu_s,
                },
            )
            self._wait()

    def _wait(self) -> None:
        asked_s, asked_cpu_s = time.perf_counter(), time.process_time()
        if self._commands.readline() != "go\n":
            _send(self._reports, {"peak_bytes": peak_bytes()})
            os._exit(0)  # from any depth of any library's loop
        self._waited_cpu_s = time.process_time() - asked_cpu_s
        self._steps = 0
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._start_s = time.perf_counter()
        self._waited_s = self._start_s - asked_s


def peak_bytes() -> int:
    """The largest resident memory of this program so far."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class Subject:
    """A process to measure.

    Attributes:
        name: its name in the table.
        command: starts it; it calls `serve`.
        needs: the packages it imports.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Those of `needs` that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


class Block(NamedTuple):
    """The figures of one turn."""

    turn: int
    """Turns of all subjects before this one."""
    steps: int
    took_s: float
    """Seconds of wall clock, everything that the loop does included."""
    faults: int
    """Page faults that read no disk."""
    waited_s: float
    """Seconds this process slept before the turn."""
    waited_cpu_s: float
    """Processor time it used in them, all threads."""

    @property
    def step_s(self) -> float:
        return self.took_s / self.steps


@dataclass
class Row:
    """What was measured of a subject; `problem` says why nothing was."""

    name: str
    problem: str | None = None
    first_step_s: float = 0.0
    """From the start of the process to the end of its first step, its wait for a task left out."""
    peak_bytes: int = 0
    """The largest resident memory of the process."""
    blocks: list[Block] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """The median block's milliseconds per step."""
        return statistics.median(b.step_s for b in self.blocks) * 1e3

    @property
    def steps_per_s(self) -> float:
        """Steps over the wall time of all turns: a rare slow step counts, unlike in a median."""
        return sum(b.steps for b in self.blocks) / sum(b.took_s for b in self.blocks)

    @property
    def faults(self) -> float:
        """The median block's page faults per step."""
        return statistics.median(b.faults / b.steps for b in self.blocks)

    @property
    def idle_load(self) -> float:
        """Processor time over wall time of its waits: 0 asleep, 1 a thread that spins."""
        return sum(b.waited_cpu_s for b in self.blocks) / sum(b.waited_s for b in self.blocks)

    def over(self, base: Row) -> tuple[float, float, float]:
        """Ratio of the medians of step time to `base`'s, with its 95 % interval over rounds."""
        mine, others = ([b.step_s for b in row.blocks] for row in (self, base))
        n = min(len(mine), len(others))

        def ratio(index: list[int]) -> float:
            top = statistics.median(mine[i] for i in index)
            return top / statistics.median(others[i] for i in index)

        return ratio(list(range(n))), *interval(ratio, n)


class ChildFailedError(Exception):
    """A child ended or fell silent; the text is the last line it printed."""


class Child:
    """The parent's side of a process that takes turns.

    Args:
        subject: what to start.
        environment: the process's whole environment.
        folder: its working folder; its output goes to `log` there.
    """

    def __init__(self, subject: Subject, environment: Mapping[str, str], folder: Path) -> None:
        self._log = folder / "log"
        commands, to_child = os.pipe()
        from_child, reports = os.pipe()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                subject.command,
                env={**environment, PIPES: f"{commands},{reports}"},
                cwd=folder,
                pass_fds=(commands, reports),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        os.close(commands)
        os.close(reports)
        self._commands, self._reports = os.fdopen(to_child, "w"), os.fdopen(from_child)

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and wait for the report."""
        try:
            self._commands.write(command + "\n")
            self._commands.flush()
        except BrokenPipeError:
            raise ChildFailedError(self._last_line()) from None
        return self.report()

    def report(self) -> dict[str, Any]:
        """Wait for the next report.

        Raises:
            ChildFailedError: there is none.
        """
        ready, _, _ = select.select([self._reports], [], [], TIMEOUT_S)
        line = self._reports.readline() if ready else ""
        report: dict[str, Any] = json.loads(line or json.dumps(FAILED))
        if report == FAILED:
            raise ChildFailedError(self._last_line() if ready else f"silent for {TIMEOUT_S:.0f} s")
        return report

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._commands, self._reports):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Processes:
    """A process per subject, started one after the other; ended by `close`.

    Args:
        subjects: what to measure.
        environment: that of all processes.
    """

    def __init__(self, subjects: Sequence[Subject], environment: Mapping[str, str]) -> None:
        self._subjects = subjects
        self._problems = {s.name: _not_installed(s) for s in subjects}
        self._imports_s: dict[str, float] = {}
        self._children: dict[str, Child] = {}
        self._stack = contextlib.ExitStack()
        for subject in subjects:
            if self._problems[subject.name] is None:
                folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
                start = time.monotonic()
                child = Child(subject, environment, folder)
                self._stack.callback(child.close)
                with self._noted(subject.name):
                    child.report()
                    self._imports_s[subject.name] = time.monotonic() - start
                    self._children[subject.name] = child

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        try:
            yield
        except ChildFailedError as error:
            self._problems[name] = f"failed: {error}"

    def take_turns(
        self,
        task: str,
        seconds: float,
        least: int = 4,
        most: int = 100,
        only: Sequence[str] | None = None,
    ) -> list[Row]:
        """Let all train a task in turns.

        The first round warms up and is dropped.

        Args:
            task: what `serve` passes to its function.
            seconds: time for everything; the last round that would exceed it is left out.
            least: rounds in any case, the first included.
            most: rounds at most.
            only: the names of the subjects that train it; None: all.

        Returns:
            A row per subject, also for those that are not installed or failed.
        """
        end = time.monotonic() + seconds
        names = [s.name for s in self._subjects if only is None or s.name in only]
        rows = [Row(name, self._problems[name]) for name in names]
        running: list[tuple[Row, Child]] = []
        for row in rows:
            if child := self._children.get(row.name):
                start = time.monotonic()
                with _noted(row):
                    child.ask(task)
                    row.first_step_s = self._imports_s[row.name] + time.monotonic() - start
                    running.append((row, child))
        _rounds(running, end, least, most)
        for row, child in running:
            if row.problem is None:
                with _noted(row):
                    row.peak_bytes = child.ask("end")["peak_bytes"]
        return rows


def _rounds(running: list[tuple[Row, Child]], end: float, least: int, most: int) -> None:
    turn = 0
    for done in range(most):
        start = time.monotonic()
        for row, child in running if done % 2 == 0 else running[::-1]:
            if row.problem is None:
                with _noted(row):
                    block = Block(turn, **child.ask("go"))
                    if done:
                        row.blocks.append(block)
                turn += 1
        now = time.monotonic()
        if done + 1 >= least and now + (now - start) > end:
            return


def _not_installed(subject: Subject) -> str | None:
    return f"not installed: {', '.join(subject.missing)}" if subject.missing else None


@contextlib.contextmanager
def _noted(row: Row) -> Iterator[None]:
    """Note a child's failure in its row."""
    try:
        yield
    except ChildFailedError as error:
        row.problem = f"failed: {error}"
