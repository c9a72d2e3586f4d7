"""Ctrl-C and SIGTERM: a run ends between two steps, with everything recorded.

While PyTorch computes, a signal only sets a flag, which the loop checks after each step. So
parameters are never half updated, and no exception passes through C++ code, which would end the
process. At any other time, and at the second signal, an exception is raised at once: nobody has to
wait for a slow download.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from mprun.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalReceivedError(BaseException):
    """A signal ends the run now; like KeyboardInterrupt, it passes every `except Exception`."""


class StopSignals:
    """Catches the signals while entered; `received` is the first one's number."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._before: list[tuple[int, object]] = []

    def __enter__(self) -> StopSignals:
        self._before = [(s, signal.signal(s, self._handle)) for s in SIGNALS]
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
        self.received = self.received or number
        if not (first and self._deferred):
            raise SignalReceivedError

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first signal waits for someone to ask `requested`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def requested(self) -> bool:
        """Whether a signal was received."""
        return self.received is not None

    def check(self) -> None:
        """Raise `SignalReceivedError` if a signal was received while it was deferred."""
        if self.requested():
            raise SignalReceivedError

    @property
    def name(self) -> str:
        """The signal's name for the user."""
        return "SIGTERM" if self.received == signal.SIGTERM else "Ctrl-C"

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as a shell reports it."""
        return EXIT_TERMINATED if self.received == signal.SIGTERM else EXIT_INTERRUPTED


def interruptible(
    job: Callable[[StopSignals], int], when: str, signals: StopSignals | None = None
) -> int:
    """The exit status of `job`, or that of the signal that stopped it.

    Args:
        job: takes the signals, entered.
        when: the end of the line that is printed after a signal: " before the run started".
        signals: catches the signals; None: new ones.
    """
    with signals or StopSignals() as stop:
        try:
            return job(stop)
        except SignalReceivedError:
            print(f"mprun: stopped by {stop.name}{when}", file=sys.stderr)
            return stop.exit_status
