"""Shared by the commands that inspect a training step: warnings, header, file of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.console import print_line, stdout_console, warn
from mprun.errors import RunFailedError, traceback_text
from mprun.records.files import write_atomic

if TYPE_CHECKING:
    from mprun.experiments.planned_run import PlannedRun

FILE = "traceback.txt"


def introduce(planned: PlannedRun) -> None:
    """Print the warnings and the header of a planned run."""
    from mprun.report.tables import header

    warn(planned.warnings)
    for line in header(planned.summary):
        print_line(stdout_console(), line)


@contextmanager
def traceback_in(folder: Path) -> Iterator[None]:
    """Write the traceback behind a `RunFailedError` into a file and name the file.

    Raises:
        RunFailedError: the same, with the file's name.
    """
    try:
        yield
    except RunFailedError as error:
        if error.__cause__ is None:
            raise
        text = traceback_text(error.__cause__)
        try:
            write_atomic(folder / FILE, text.encode(errors="replace"))
        except OSError:
            where = "its traceback could not be written"
        else:
            where = f"the traceback is in {folder / FILE}"
        raise RunFailedError(f"{error} ({where})") from None
