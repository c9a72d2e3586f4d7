"""The command line: which command, its help, and the exit status.

With `config/` the only place that knows Hydra. What needs torch is imported when a command runs, so
that help and mistakes in the overrides are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mprun.cli.advise_command import advise_command
from mprun.cli.compare_command import compare_command
from mprun.cli.data_command import data_command
from mprun.cli.doctor_command import doctor_command
from mprun.cli.double_command import double_command
from mprun.cli.memory_command import memory_command
from mprun.cli.numerics_command import numerics_command
from mprun.cli.search_ops_command import search_ops_command
from mprun.cli.sweep_command import sweep_command
from mprun.cli.trace_command import trace_command
from mprun.cli.train_command import SweepStoppedError, train
from mprun.errors import EXIT_INTERRUPTED, EXIT_OK, MprunError, UsageError, hint, printable


@dataclass(frozen=True)
class Command:
    """A word that may stand first on the command line."""

    name: str
    summary: str
    run: Callable[[list[str]], int]
    settings: tuple[str, ...] = ()
    """Sections of `config/settings.py` it takes."""

    @property
    def text(self) -> str:
        """What its module says of it."""
        return (sys.modules[self.run.__module__].__doc__ or "").strip()


COMMANDS = (
    Command("train", "train one recipe in one precision (the default command)", train),
    Command(
        "sweep",
        "every mode with every seed, then the comparison: mprun sweep recipe=mnist",
        sweep_command,
        ("compare", "seeds", "first_seed"),
    ),
    Command(
        "compare",
        "variants of finished runs side by side: mprun compare outputs/DATE/TIME",
        compare_command,
        ("compare",),
    ),
    Command(
        "advise",
        "try the modes, recommend one, write it as a preset: mprun advise recipe=mnist",
        advise_command,
        ("advise", "compare", "seeds", "first_seed"),
    ),
    Command(
        "double",
        "is a doubled batch worth it? mprun double recipe=mnist precision=bf16_mixed",
        double_command,
        ("double", "compare", "seeds", "first_seed"),
    ),
    Command("trace", "one step op by op, rules and casts: mprun trace op_lists=hmp", trace_command),
    Command(
        "doctor",
        "what this machine does natively, and how fast in each format",
        doctor_command,
        ("doctor",),
    ),
    Command(
        "memory",
        "memory of a step, modes side by side: mprun memory precision=fp32,half_sr",
        memory_command,
        ("memory",),
    ),
    Command(
        "numerics",
        "what formats lose of a run's numbers; a loss scale: mprun numerics recipe=mnist",
        numerics_command,
        ("numerics",),
    ),
    Command(
        "search-ops",
        "which ops must stay in fp32: mprun search-ops precision=fp16_mixed",
        search_ops_command,
        ("search_ops", "seeds"),
    ),
    Command("data", "verify or fetch the published files: mprun data verify", data_command),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mprun with `arguments` (default: the process's own); the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except MprunError as error:
        print(f"mprun: {printable(str(error))}", file=sys.stderr)
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


def _dispatch(words: list[str]) -> int:
    by_name = {c.name: c for c in COMMANDS}
    first = words[0] if words else ""
    if any(w in ("--help", "-h", "help") for w in words):
        _help(by_name.get(first))
        return EXIT_OK
    if "--version" in words:
        from mprun import __version__

        print(f"mprun {__version__}")
        return EXIT_OK
    if first in by_name:
        return by_name[first].run(words[1:])
    if _is_no_override(first) and (near := hint(first, by_name)):
        raise UsageError(f"there is no command '{first}'; legal: {', '.join(by_name)}{near}")
    return train(words)


def _is_no_override(word: str) -> bool:
    """Whether a word looks like a command; the name of a group or a field lacks its value."""
    from mprun.config.reference import GROUPS, leaves, sections

    letters = word.replace("-", "").replace("_", "").isalpha()
    return letters and word not in (*GROUPS, *leaves(), *sections())


def _help(command: Command | None) -> None:
    from mprun.cli.help import show_command, show_help

    if command is None or command.run is train:
        show_help([(c.name, c.summary) for c in COMMANDS])
    else:
        show_command(command.text, command.settings)
