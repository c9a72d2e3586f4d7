"""The arguments of a command: options, read by argparse, and overrides between them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mprun.errors import UsageError, hint


class Arguments(argparse.Namespace):
    """The arguments of a command; an option that it does not have keeps its default."""

    overrides: list[str]
    """`name=value`."""
    config_dir: Path | None = None
    """A further folder of configs."""
    multirun: bool = False
    show_config: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message.removeprefix('argument ')}")


def parse_arguments(command: str, args: Sequence[str]) -> Arguments:
    """Separate the options of a command, in the arguments after its name, from its overrides.

    Raises:
        UsageError: the command has no such option, or a value is missing.
    """
    parser = _Parser(prog=f"mprun {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    legal = ["--help"]
    if command not in ("capture", "compare", "data", "diff", "doctor", "new-recipe"):
        parser.add_argument("--config-dir", type=_folder)
        legal = ["--config-dir", *legal]
    if command == "train":
        parser.add_argument("-m", "--multirun", action="store_true")
        parser.add_argument("--show-config", action="store_true")
        legal += ["--multirun", "--show-config", "--version", "--completion"]
    known, unknown = parser.parse_known_intermixed_args(args, Arguments())
    if unknown:
        raise UsageError(
            f"{parser.prog} has no option '{unknown[0]}'; legal: {', '.join(legal)}"
            f"{hint(unknown[0], legal)}"
        )
    return known


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a folder")
    return Path(text)
