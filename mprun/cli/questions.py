"""Asks a question of `inspect`: the one way from its arguments to its result and exit status."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from mprun import inspect
from mprun.cli.arguments import Command, parse_arguments
from mprun.inspect.question import Given, Measuring, Prepared, Question
from mprun.records.console import print_line, report_nothing, stdout_console, warn
from mprun.records.result import measuring, show
from mprun.train.signals import StopSignals, interruptible


def questions() -> Iterator[tuple[Command, Question]]:
    """`QUESTION` of each module of `inspect`, and of each package in it, with its command."""
    for module in iter_modules(inspect.__path__, "mprun.inspect."):
        # Only these are imported: most others import torch, which takes seconds
        if _has_question(module.name):
            imported = import_module(module.name)
            asked: Question = imported.QUESTION
            taken = (asked.settings, asked.takes_run, asked.folders_of)
            ask = partial(_ask, asked)
            yield Command(asked.name, ask, imported.__doc__ or "", *taken), asked


def _has_question(module: str) -> bool:
    """Whether the source of a module says so."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:  # a folder without __init__.py
        return False
    return b"\nQUESTION = " in Path(spec.origin).read_bytes()


def _ask(question: Question, args: Sequence[str]) -> int:
    from mprun.config.settings import Settings, take

    known = parse_arguments(question, args)
    settings, overrides = Settings(), known.overrides
    if question.takes_run:  # else the arguments are files, whose names may have a =
        settings, overrides = take(known.overrides, *question.settings)
    given = Given(overrides, known.config_dir, known, known.overrides, settings)
    return interruptible(
        lambda stop: _answered(question.prepare(given), stop), " before the first result"
    )


def _answered(prepared: Prepared, stop: StopSignals) -> int:
    from mprun.records.files import new_folder

    warn(prepared.warnings)
    for line in prepared.lines:
        print_line(stdout_console(), line)
    config = prepared.composed and prepared.composed.config
    made = new_folder(config.run.dir) if config else None
    folder = made or prepared.folder
    # a traceback goes into a new folder only: an old one may be a run's, which has its own
    with nullcontext(report_nothing) if prepared.as_json else measuring(made) as report:
        result = prepared.measure(Measuring(report, stop, folder))
    with stop.deferred():  # files are written whole
        if prepared.as_json:
            print(result.json, end="")
        else:
            show(result, folder)
        prepared.after(result, folder)
    return result.status if stop.received is None else stop.exit_status
