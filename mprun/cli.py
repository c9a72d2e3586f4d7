"""The command line: which command, its help, and the exit status.

With `config/` the only place that knows Hydra. What needs torch is imported when a command runs, so
that help and mistakes in the overrides are answered at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mprun.data_command import data_command
from mprun.errors import EXIT_INTERRUPTED, EXIT_OK, MprunError, UsageError, hint
from mprun.search_ops_command import search_ops_command
from mprun.trace_command import trace_command
from mprun.train_command import SweepStoppedError, train


@dataclass(frozen=True)
class Command:
    """A word that may stand first on the command line."""

    name: str
    summary: str
    run: Callable[[list[str]], int]


COMMANDS = (
    Command("train", "train one recipe in one precision (the default command)", train),
    Command("trace", "one step op by op, rules and casts: mprun trace op_lists=hmp", trace_command),
    Command(
        "search-ops",
        "which ops must stay in fp32: mprun search-ops precision=fp16_mixed",
        search_ops_command,
    ),
    Command("data", "verify or fetch the published files: mprun data verify", data_command),
)

WORD = re.compile(r"[A-Za-z][A-Za-z_-]*")
"""What could be meant as a command; overrides have a `=`, options begin with a dash."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mprun with `arguments` (default: the process's own); the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except MprunError as error:
        print(f"mprun: {_printable(str(error))}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:  # before a run catches signals itself
        print("mprun: stopped by Ctrl-C before the run began", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SweepStoppedError as stopped:
        return stopped.status
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
    if WORD.fullmatch(first) and (near := hint(first, by_name)):
        raise UsageError(f"there is no command '{first}'; legal: {', '.join(by_name)}{near}")
    return train(words)
