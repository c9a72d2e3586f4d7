"""The errors a user can cause, and their exit statuses.

An error names the value received, the legal ones and a remedy, in one line. `cli.main` prints it
and exits with `status`, without a traceback. One that the user's own code raised is named with the
place in that code (`place_of`).
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import CodeType
from typing import NamedTuple

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2  # As argparse ends, which reads the options
EXIT_CONDITION = 3  # Of its own, so that CI tells a worse mode from a failure and from a mistake
EXIT_OPEN = 4  # Nothing is wrong so far, and a question is left open
EXIT_INTERRUPTED = 130  # 128 + SIGINT


class MprunError(Exception):
    """An error with a message meant for the user."""

    status = EXIT_FAILED

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the line, without a traceback."""
        return [f"mprun: {printable(str(self))}"]


class UsageError(MprunError):
    """A mistake, `except mprun.UsageError`: overrides, recipe or data cannot be used (status 2)."""

    status = EXIT_USAGE


class RunFailedError(MprunError):
    """The run itself failed: `except mprun.RunFailedError`; its record says why (status 1)."""


class MachineFailedError(RunFailedError):
    """The machine ended a run: a full disk, too little memory. It says nothing about the mode."""


class ConditionMetError(MprunError):
    """The condition of `compare.fail_if` is true (status 3)."""

    status = EXIT_CONDITION


class NotMeasurableError(ValueError):
    """A model or a loss that cannot be measured."""


# No `Exception`: code of the user that catches those must not stop it
class EndError(BaseException):
    """Ends what runs, on demand of the user or the system."""


class StoppedError(EndError):
    """Ends a sweep or study, because a signal ended a run or no run was completed.

    `status` is the exit status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@contextmanager
def as_usage_error(before: str = "") -> Iterator[None]:
    """Inside, a `ValueError` becomes a `UsageError` with its text, after `before`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{before}{error}") from None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The entry of `known` closest in spelling to `word`, or None where nothing is close."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def hint(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, or an empty string."""
    return did_you_mean(get_close_matches(word, list(known), n=1))


def did_you_mean(names: Sequence[str]) -> str:
    """`; did you mean 'x', 'y' or 'z'?`, or an empty string without names."""
    texts = [f"'{x}'" for x in names]
    if not texts:
        return ""
    return f"; did you mean {' or '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))}?"


def printable(text: str) -> str:
    """`text` as one line that cannot steer a terminal, whatever its source."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


MAX_LINE = 500  # Characters of a first line in a message


def text_of(error: BaseException) -> str:
    """An error's text; the user's own class may fail to give one."""
    try:
        return str(error)
    except (KeyboardInterrupt, EndError):
        raise
    except BaseException as failure:  # whatever user code raises
        return f"its text cannot be shown: __str__ raised {type(failure).__name__}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, not longer than a line may be."""
    line = (text_of(error).strip() or "no message").splitlines()[0]
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} ... (cut)"


def is_from_code(error: BaseException) -> bool:
    """Whether an error is that of code, the user's or ours, and no demand to end the process.

    Code may raise classes that are no `Exception` (`GeneratorExit`, its own).
    """
    return not isinstance(error, (KeyboardInterrupt, SystemExit, EndError))


# ---- the place in the user's code ----------------------------------------------------------------

_INSTALLED = ("site-packages", "dist-packages")  # The second is Debian's name
# Compiled modules have a folder of their own (lib64) on some systems
_STANDARD = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib"))
_OWN = str(Path(__file__).resolve().parent)


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str = ""  # The function that contains it; empty at a module's level

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{shown}:{self.line}" + (f", in {self.function}" if self.function else "")


def is_users(file: str) -> bool:
    """Whether a file of code is the user's: not mprun's, Python's, PyTorch's or an installed one's.

    The recipes that ship with mprun count as the user's, unless they are installed.
    """
    if file.startswith("<") or set(_INSTALLED) & set(Path(file).parts):  # `<string>`: of exec
        return False
    # PyTorch may be a build of its sources, in any folder; not imported here, which takes seconds
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    libraries = (_OWN, *_STANDARD, *([str(Path(torch).parent)] if torch else []))
    return not any(file.startswith(f"{folder}{os.sep}") for folder in libraries)


def place_of(error: BaseException) -> Place | None:
    """The innermost line of the user's code that an error came through; None without one."""
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return Place(error.filename, error.lineno or 1)
    trace = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [x for x in trace if is_users(x[0].co_filename)]
    return Place(users[-1][0].co_filename, users[-1][1], _name(users[-1][0])) if users else None


def definition(function: object) -> Place | None:
    """The first line of a function of the user's; None for any other."""
    while hasattr(function, "__wrapped__"):  # by functools.wraps: the decorator's lines say little
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or not is_users(code.co_filename):
        return None
    return Place(code.co_filename, code.co_firstlineno, _name(code))


def _name(code: CodeType) -> str:
    qualified: str = getattr(code, "co_qualname", code.co_name)  # new in Python 3.11
    name = qualified.rpartition("<locals>.")[2]
    return "" if name == "<module>" else name
