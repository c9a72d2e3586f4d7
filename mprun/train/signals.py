"""Ctrl-C, SIGTERM and SIGHUP: a run ends between two steps, with everything recorded.

While PyTorch computes, a signal only sets a flag, which the loop checks after each step. So
parameters are never half updated. At any other time, and at the second signal, an exception is
raised at once: nobody has to wait for a slow download.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from mprun.errors import EndError

SIGHUP = getattr(signal, "SIGHUP", None)  # The terminal was closed. Windows has none
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([SIGHUP] if SIGHUP is not None else []))


class SignalReceivedError(EndError):
    """A signal ends the run now; like KeyboardInterrupt, it passes every `except Exception`."""


class StopSignals:
    """Catches the signals while entered; `received` is the first one's number.

    If `patient`, a second signal waits like the first: torchrun passes Ctrl-C on to processes that
    got it from the terminal.
    """

    def __init__(self, patient: bool = False) -> None:
        self.received: int | None = None
        self._patient = patient
        self._deferred = 0
        self._before: list[tuple[int, object]] = []

    def __enter__(self) -> StopSignals:
        # a process that was started to ignore SIGHUP (`nohup`) continues to
        heeded = [s for s in SIGNALS if s != SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
        self._before = [(s, signal.signal(s, self._handle)) for s in heeded]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        if number == SIGHUP:
            _leave_closed_terminal()
            if not first:  # the system and the shell may both send it: no second request
                return
        self.received = self.received or number
        # raised inside of PyTorch, it would pass through C++ code, which ends the process
        if not (self._deferred and (first or self._patient)):
            raise SignalReceivedError

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first signal waits for someone to ask `requested`."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def requested(self) -> bool:
        """Whether a signal was received; it is asked after each step."""
        return self.received is not None

    @property
    def name(self) -> str:
        """The signal's name for the user."""
        number = self.received or signal.SIGINT
        return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as a shell reports it."""
        return 128 + (self.received or signal.SIGINT)


def _leave_closed_terminal() -> None:
    """Send to nowhere what this process still prints to a terminal that was closed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # of no file, or closed
            descriptor = stream.fileno()
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            if is_device and not os.isatty(descriptor):  # printing to it would raise EIO
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def interruptible(
    job: Callable[[StopSignals], int], when: str, signals: StopSignals | None = None
) -> int:
    """The exit status of `job`, or that of the signal that stopped it.

    The line that is printed after a signal ends with `when`, such as " before the run started".
    """
    with signals or StopSignals() as stop:
        try:
            return job(stop)
        except SignalReceivedError:
            print(f"mprun: stopped by {stop.name}{when}", file=sys.stderr)
            return stop.exit_status
