"""The errors a user can cause, and their exit statuses.

An error names the value received, the legal ones and a remedy, in one line. `cli.main` prints it
and exits with `status`, without a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONDITION = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT


class MprunError(Exception):
    """An error with a message meant for the user."""

    status = EXIT_FAILED


class UsageError(MprunError):
    """The command line, the configuration or the data it names cannot be used (status 2)."""

    status = EXIT_USAGE


class RunFailedError(MprunError):
    """The run itself failed, for a reason that needs no traceback (status 1)."""


class MachineFailedError(RunFailedError):
    """The machine ended a run: a full disk, too little memory. It says nothing about the mode."""


class ConditionMetError(MprunError):
    """The condition of `compare.fail_if` is true (status 3)."""

    status = EXIT_CONDITION


class StoppedError(BaseException):
    """A signal ended a run, and with it the sweep or study; `status` is the exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The entry of `known` closest in spelling to `word`, or None where nothing is close."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def hint(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, or an empty string."""
    near = nearest(word, known)
    return f"; did you mean '{near}'?" if near else ""


def printable(text: str) -> str:
    """`text` as one line that cannot steer a terminal, whatever its source."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or "no message").splitlines()[0]
