"""Commands: their arguments (options and overrides between them), and those that ask a question."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NoReturn

from mprun import inspect
from mprun.errors import UsageError, hint
from mprun.inspect.question import Given, Measuring, Prepared, Question
from mprun.records.console import note, print_line, report_nothing, stdout_console, warn
from mprun.records.listing import RUNS, STUDIES, resolved_last
from mprun.records.result import measuring, show
from mprun.train.signals import StopSignals, interruptible


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    name: str
    run: Callable[[list[str]], int]
    """Runs it with the arguments after its name; the exit status."""
    help: str
    settings: tuple[str | type, ...] = ()
    """The sections that it takes, as in `config.settings.fields`."""
    takes_run: bool = True
    """Whether it takes the overrides of a run."""
    folders_of: tuple[str, ...] = ()
    """Of which commands it takes folders: `last` is then the newest of them."""

    @property
    def text(self) -> str:
        """Its help."""
        return cleandoc(self.help)

    @property
    def summary(self) -> str:
        """The first line of its help, without the command's name."""
        return self.text.partition("\n")[0].partition(": ")[2].rstrip(".")


class Arguments(argparse.Namespace):
    """The arguments of a command; an option that it does not have keeps its default."""

    overrides: list[str]  # `name=value`
    config_dir: Path | None = None  # A further folder of configs
    multirun: bool = False
    show_config: bool = False
    save: Path | None = None  # Of diff: where one side is written
    verbose: bool = False  # Everything, not the short answer
    compiled: bool = False  # Of diff: whether a run is compared with itself, compiled
    update: bool = False  # Of check: whether the baseline is written


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder")
    return Path(text)


FLAG = {"action": "store_true"}
# Each option: its arguments for argparse, and the commands that take it
OPTIONS: dict[tuple[str, ...], tuple[dict[str, Any], tuple[str, ...]]] = {
    ("--save",): ({"type": Path}, ("diff",)),
    ("--compiled",): (FLAG, ("diff",)),
    ("--update",): (FLAG, ("check",)),
    ("--verbose", "-v"): (FLAG, ("sweep", "compare", "advise", "double", "numerics", "show")),
    ("--multirun", "-m"): (FLAG, ("train",)),
    ("--show-config",): (FLAG, ("train",)),
}
CONFIG_DIR = ("--config-dir", "-cd")  # Of every command that takes the overrides of a run


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message.removeprefix('argument ')}")


def parse_arguments(command: Command | Question, args: Sequence[str]) -> Arguments:
    """Separate the options of a command, in the arguments after its name, from its overrides."""
    # `main` answers --help, wherever it stands; abbreviations are refused with the full name
    parser = _Parser(prog=f"mprun {command.name}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    taken = {names: spec for names, (spec, by) in OPTIONS.items() if command.name in by}
    if command.takes_run:
        taken = {CONFIG_DIR: {"type": _folder}, **taken}
    for names, spec in taken.items():
        parser.add_argument(*names, **spec)
    legal = [*(names[0] for names in taken), "--help"]
    if command.name == "train":  # `main` answers it before a command is chosen
        legal.append("--version")
    # intermixed: options may stand between overrides
    known, unknown = parser.parse_known_intermixed_args(args, Arguments())
    if unknown:
        fields = "; a field is written name=value, without dashes" if command.takes_run else ""
        raise UsageError(
            f"{parser.prog} has no option '{unknown[0]}'; legal: {', '.join(legal)}"
            f"{hint(unknown[0], legal)}{fields}"
        )
    return known


def with_last(command: Command | Question, args: Sequence[str]) -> list[str]:
    """The arguments with a folder in place of each `last`; standard error names it."""
    # a command resumes its own runs alone: sweep no run of advise
    resumed = (command.name,) if command.name in (*RUNS, *STUDIES) else ()
    of_fields = {"run.resume": resumed, "train.init_from": RUNS}
    resolved = []
    for text in args:
        key, is_field, value = text.rpartition("=")
        makers = of_fields.get(key, ()) if is_field else command.folders_of
        path = resolved_last(value, *makers) if makers else value
        if path != value:
            note(f"{text} is {path}")
            if is_field:
                from mprun.config.reference import as_text, quoted

                text = f"{key}={quoted(as_text(path))}"  # a folder's name may have Hydra's signs
            else:
                text = path
        resolved.append(text)
    return resolved


# ---- questions of `inspect` ----------------------------------------------------------------------


def questions() -> Iterator[tuple[Command, Question]]:
    """`QUESTION` of each module of `inspect`, and of each package in it, with its command."""
    for module in iter_modules(inspect.__path__, "mprun.inspect."):
        spec = find_spec(module.name)
        source = Path(spec.origin).read_bytes() if spec and spec.origin else b""
        # Only these are imported: most others import torch, which takes seconds
        if b"\nQUESTION = " in source:
            imported = import_module(module.name)
            asked: Question = imported.QUESTION
            taken = (asked.settings, asked.takes_run, asked.folders_of)
            ask = partial(_ask, asked)
            yield Command(asked.name, ask, imported.__doc__ or "", *taken), asked


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
