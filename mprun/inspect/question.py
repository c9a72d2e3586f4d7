"""A question: a command that measures, in one module of this room.

The module has `QUESTION`, and its docstring is the help: the first line is the summary. It does not
import torch before it prepares, so that help and mistakes are answered at once. `cli/arguments.py`
asks it: parses the arguments, prepares, shows what is planned, makes the folder, measures, shows
the result and writes its files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mprun.train.signals import StopSignals

if TYPE_CHECKING:
    from mprun.config import Composed
    from mprun.config.settings import Settings
    from mprun.records.console import ReportPart
    from mprun.records.console.fitted_table import FittedTable
    from mprun.records.result import Result
    from mprun.study.planned_run import PlannedRun

T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """The arguments of a question."""

    overrides: list[str]  # Without settings; or names of files and folders
    config_dir: Path | None
    options: argparse.Namespace  # `--save`, `--update`: an option not given has its default
    texts: list[str]  # Overrides and settings, as they were typed
    all_settings: Settings

    def settings(self, section: type[T]) -> T:
        """The question's settings, of their class."""
        return self.all_settings.own(section)


@dataclass(frozen=True)
class Measuring:
    """What `measure` gets."""

    report: ReportPart  # Is called when a part of the measurement begins
    stop: StopSignals  # Ctrl-C ends a measurement at once; inside `stop.deferred()` it waits
    folder: Path | None  # Where the files of the result go


@dataclass(frozen=True)
class Prepared:
    """A question whose arguments are checked: all that can be wrong with them was reported."""

    measure: Callable[[Measuring], Result]
    composed: Composed | None = None  # `run.dir` of it names the new folder for the files
    folder: Path | None = None  # An existing folder for the files, if no new one is made
    warnings: Sequence[str] = ()  # For standard error, before the measurement
    lines: Sequence[str] = ()  # For standard output, before the measurement
    after: Callable[[Result, Path | None], None] = lambda result, folder: None
    """Is called when the result was shown."""
    as_json: bool = False  # Whether standard output gets the record alone, without progress


@dataclass(frozen=True)
class SavedResult:
    """The file of a result, which `mprun show` shows again."""

    name: str
    record: type
    newest: int  # The `schema_version` that is written; newer files are of a later mprun
    parts: Callable[[Any], Iterable[FittedTable | str]]
    short: Callable[[Any], Iterable[FittedTable | str]] | None = None
    """What is shown without `--verbose`; None: the same."""


@dataclass(frozen=True)
class Question:
    """`QUESTION` of a module of this room."""

    name: str
    prepare: Callable[[Given], Prepared]
    """Checks the arguments and plans, before a folder is made."""
    settings: tuple[type, ...] = ()
    """The classes of its settings: `TraceSettings` has `trace.ops`."""
    takes_run: bool = True
    """Whether it takes the overrides of a run; else names of files and folders."""
    folders_of: tuple[str, ...] = ()
    """Of which commands it takes folders: `last` is then the newest of them."""
    saved: SavedResult | None = None


def prepared_by(module: str) -> Callable[[Given], Prepared]:
    """`prepare` of a module that imports torch: it is imported when the question is asked.

    That module imports the record of its question. So the question has its name alone, and files
    import each other in one direction.
    """
    return lambda given: import_module(module).prepare(given)


def of_run(planned: PlannedRun, measure: Callable[[Measuring], Result], **more: Any) -> Prepared:
    """A question on one planned run: its warnings and its header are shown first."""
    from mprun.study.report.tables import header

    lines = [*header(planned.summary), *more.pop("lines", ())]
    return Prepared(measure, planned.composed, None, planned.warnings, lines, **more)
