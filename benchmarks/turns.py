"""Processes that train in turns: one works, the others sleep, and drift of the machine hits all.

Two libraries in one process share a heap, an allocator's state, threads and imports, so none of
them is measured as a user has it. Two processes one after the other see different machines: clock
frequency and other load change within minutes by more than the libraries differ. So each subject
has a process of its own, and the processes take turns, block by block of a few steps, in an order
that reverses from round to round (A B C, C B A, ...): a steady drift cancels. A turn is a time,
not a number of steps, so that the whole takes about as long on a slow machine as on a fast one.

The child calls `Turns` after each of its steps. It reports a line of JSON where a block ends and
sleeps in a read until the parent writes `go`. The price is that a process wakes with cold caches
at the start of its block; all pay it alike.

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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from benchmarks.alternate import interval

PIPES = "MPRUN_BENCH_PIPES"
"""Environment variable of a child: the descriptors it reads commands from and reports to."""
TIMEOUT_S = 240.0
"""A child that is silent for longer has failed."""


class Turns:
    """The child's side: called after each optimizer step, returns when the next may begin.

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

    @classmethod
    def joined(cls, seconds: float) -> Turns:
        """The turns of the parent that started this process."""
        read, write = map(int, os.environ[PIPES].split(","))
        return cls(seconds, os.fdopen(read), os.fdopen(write, "w"))

    def __call__(self) -> None:
        if not self._started:  # the first step: a report without figures
            self._started = True
            self._report({})
            self._wait()
            return
        self._steps += 1
        took_s = time.perf_counter() - self._start_s
        if took_s >= self._seconds:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
            self._report(
                {
                    "steps": self._steps,
                    "took_s": took_s,
                    "faults": faults,
                    "waited_s": self._waited_s,
                    "waited_cpu_s": self._waited_cpu_s,
                }
            )
            self._wait()

    def _report(self, figures: dict[str, float]) -> None:
        self._reports.write(json.dumps(figures) + "\n")
        self._reports.flush()

    def _wait(self) -> None:
        asked_s, asked_cpu_s = time.perf_counter(), time.process_time()
        if self._commands.readline() != "go\n":
            self._report({"peak_bytes": peak_bytes()})
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
        command: starts it; it calls `Turns.joined(seconds)` after each step, for ever.
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
    """From the start of the process to the end of its first step."""
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
        if not line:
            raise ChildFailedError(self._last_line() if ready else f"silent for {TIMEOUT_S:.0f} s")
        report: dict[str, Any] = json.loads(line)
        return report

    def _last_line(self) -> str:
        self._process.wait(timeout=TIMEOUT_S)
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._commands, self._reports):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def take_turns(
    subjects: Sequence[Subject],
    environment: Mapping[str, str],
    seconds: float,
    least: int = 4,
    most: int = 100,
) -> list[Row]:
    """Start a process per subject, one after the other, and let them take turns.

    The first round warms up and is dropped.

    Args:
        subjects: what to measure.
        environment: that of all processes.
        seconds: time for everything; the last round that would exceed it is left out.
        least: rounds in any case, the first included.
        most: rounds at most.

    Returns:
        A row per subject, also for those that are not installed or failed.
    """
    end = time.monotonic() + seconds
    rows = [Row(s.name, _not_installed(s)) for s in subjects]
    with contextlib.ExitStack() as stack:
        running: list[tuple[Row, Child]] = []
        for subject, row in zip(subjects, rows, strict=True):
            if row.problem is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                start = time.monotonic()
                child = Child(subject, environment, folder)
                stack.callback(child.close)
                with _noted(row):
                    child.report()
                    row.first_step_s = time.monotonic() - start
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
