"""A command, and its arguments: options, read by argparse, and overrides between them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mprun.errors import UsageError, hint
from mprun.records.console import note
from mprun.records.listing import RUNS, STUDIES, resolved_last

if TYPE_CHECKING:
    from mprun.inspect.question import Question


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
    update: bool = False  # Of check: whether the baseline is written


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder")
    return Path(text)


FLAG = {"action": "store_true"}
# Each option: its arguments for argparse, and the commands that take it
OPTIONS: dict[tuple[str, ...], tuple[dict[str, Any], tuple[str, ...]]] = {
    ("--save",): ({"type": Path}, ("diff",)),
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
    """Separate the options of a command, in the arguments after its name, from its overrides.

    Raises:
        UsageError: the command has no such option, or a value is missing.
    """
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
    """The arguments with a folder in place of each `last`; standard error names it.

    Raises:
        UsageError: there is no such folder.
    """
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
