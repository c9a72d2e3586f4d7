"""The command line: which command, its help, and the exit status.

With `config/` the only place that knows Hydra. What needs torch is imported when a command runs, so
that help and mistakes in the overrides are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import EXIT_OK, MprunError, UsageError, hint

if TYPE_CHECKING:
    from mprun.config import Composed
    from mprun.stop import StopSignals


@dataclass(frozen=True)
class Command:
    """A word that may stand first on the command line."""

    name: str
    summary: str
    run: Callable[[list[str]], int]


@dataclass(frozen=True)
class Arguments:
    """A command's arguments, taken apart."""

    overrides: tuple[str, ...]
    config_dir: Path | None = None
    show_config: bool = False


def parse(arguments: Sequence[str]) -> Arguments:
    """Separate overrides from the options.

    Raises:
        UsageError: an option that is not known, or lacks its value.
    """
    overrides, config_dir, show = [], None, False
    rest = iter(arguments)
    for word in rest:
        name, has_value, value = word.partition("=")
        if name == "--config-dir":
            config_dir = value if has_value else next(rest, None)
            if not config_dir:
                raise UsageError("--config-dir needs a folder")
        elif word == "--show-config":
            show = True
        elif word.startswith("-"):
            known = ["--help", "--version", "--config-dir", "--show-config"]
            raise UsageError(
                f"there is no option '{word}'; legal: {', '.join(known)}{hint(word, known)}"
            )
        else:
            overrides.append(word)
    return Arguments(tuple(overrides), Path(config_dir) if config_dir else None, show)


def train(words: list[str]) -> int:
    """Compose, check, plan and run."""
    from mprun.config import compose

    arguments = parse(words)
    composed = compose(arguments.overrides, arguments.config_dir)
    if arguments.show_config:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(composed.resolved), end="")
        return EXIT_OK

    from mprun.stop import SignalReceivedError, StopSignals

    with StopSignals() as stop:
        try:
            return _train(composed, stop)
        except SignalReceivedError:
            print(f"mprun: stopped by {stop.name} before the run began", file=sys.stderr)
            return stop.exit_status


def _train(composed: Composed, stop: StopSignals) -> int:
    from mprun.build import plan
    from mprun.report.tables import stderr_console, stdout_console
    from mprun.session import run

    chosen = plan(composed.config, composed.given)
    errors = stderr_console()
    by_field = {text.split(" ", 1)[0]: text for text in (*composed.warnings, *chosen.warnings)}
    for warning in by_field.values():
        errors.print(f"warning: {warning}", highlight=False, markup=False, soft_wrap=True)
    return run(chosen, composed.resolved, stop, stdout_console())


COMMANDS = (Command("train", "train one recipe in one precision (the default command)", train),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mprun with `arguments` (default: the process's own); the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except MprunError as error:
        print(f"mprun: {_printable(str(error))}", file=sys.stderr)
        return error.status
    except BrokenPipeError:  # the reader of our output left: `mprun --help | head`
        # At exit Python flushes once more, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return status


def _printable(text: str) -> str:
    """`text` as one line that cannot steer a terminal, whatever the user's words held."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _dispatch(words: list[str]) -> int:
    if any(w in ("--help", "-h", "help") for w in words):
        from mprun.help import show_help

        show_help([(c.name, c.summary) for c in COMMANDS])
        return EXIT_OK
    if "--version" in words:
        from mprun import __version__

        print(f"mprun {__version__}")
        return EXIT_OK
    by_name = {c.name: c for c in COMMANDS}
    first = words[0] if words else ""
    if first in by_name:
        return by_name[first].run(words[1:])
    if first.isalpha() and (near := hint(first, by_name)):
        raise UsageError(f"there is no command '{first}'; legal: {', '.join(by_name)}{near}")
    return train(words)
