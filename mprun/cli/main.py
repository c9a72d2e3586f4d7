"""The command line: which command, its help, and the exit status.

A command imports torch only when it runs. So help, and the message about a wrong override, are
printed at once.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from mprun.cli.arguments import questions, with_last
from mprun.cli.compare_command import COMPARE
from mprun.cli.file_commands import DATA, EXPORT, NEW_RECIPE
from mprun.cli.record_commands import LS, SHOW
from mprun.cli.standard_streams import patient_streams
from mprun.cli.study_commands import ADVISE, DOUBLE, SWEEP
from mprun.cli.train_command import TRAIN, train_command
from mprun.config import settings
from mprun.config.reference import GROUPS, leaves, options, sections
from mprun.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    MprunError,
    StoppedError,
    UsageError,
    first_line,
    hint,
    is_from_code,
    place_of,
    printable,
)
from mprun.records.files import Launch, launch_of
from mprun.train.stopwatch import process_start

if TYPE_CHECKING:
    from mprun.train.parallel.coordinator import GroupCoordinator

# The commands in the order of help; a question that is not named here comes behind these
ORDER = (
    *("train", "sweep", "compare", "advise", "double", "check", "ls", "show", "trace"),
    *("doctor", "memory", "numerics", "search-ops", "diff", "replay", "export", "data"),
    "new-recipe",
)
COMMANDS = sorted(
    [
        *(TRAIN, SWEEP, COMPARE, ADVISE, DOUBLE, LS, SHOW, EXPORT, DATA, NEW_RECIPE),
        *(command for command, _ in questions()),
    ],
    key=lambda x: ORDER.index(x.name) if x.name in ORDER else len(ORDER),
)
BY_NAME = {command.name: command for command in COMMANDS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mprun with `arguments` (default: the process's own); the exit status."""
    is_process = arguments is None
    args = list(sys.argv[1:] if arguments is None else arguments)
    with patient_streams() as output:
        # of a process, the time until the first step has its imports
        started_at = process_start() if is_process else time.perf_counter()
        status = in_all_processes(lambda: _status(args, started_at))
    return output.status(status)


def _status(args: list[str], started_at: float) -> int:
    """The exit status of a command; its error is printed."""
    try:
        return _dispatch(args, started_at)
    except MprunError as error:
        print(f"mprun: {printable(str(error))}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:  # before a run catches signals itself
        print("mprun: stopped by Ctrl-C before the run started", file=sys.stderr)
        return EXIT_INTERRUPTED
    except StoppedError as stopped:
        return stopped.status
    except BaseException as error:  # user code may raise a class that is no Exception
        if isinstance(error, Exception) or not is_from_code(error):
            raise
        place = place_of(error)
        where = f" ({place})" if place else ""
        text = f"{type(error).__name__}: {first_line(error)}{where}"
        print(f"mprun: {printable(text)}", file=sys.stderr)
        return EXIT_FAILED


def _dispatch(args: list[str], started_at: float) -> int:
    first = args[0] if args else ""
    if {"--help", "-h", "help"} & {*args}:  # before parsing: help is given beside any mistake
        if first in BY_NAME and first != "train":
            show_command(BY_NAME[first].text, BY_NAME[first].settings)
        else:
            show_help([(c.name, c.summary) for c in COMMANDS])
        return EXIT_OK
    if "--version" in args:
        from mprun import __version__

        print(f"mprun {__version__}")
        return EXIT_OK
    args = with_last(BY_NAME.get(first, TRAIN), args)  # train needs not be named
    if first == "train":
        return train_command(args[1:], started_at)
    if first in BY_NAME:
        return BY_NAME[first].run(args[1:])
    if first == "run":  # as in Python, where it is `mprun.run`
        raise UsageError("there is no command 'run'; write mprun train, or the overrides alone")
    # letters like a command, and not a group's or field's name without value
    letters = first.replace("-", "").replace("_", "").isalpha()
    is_override = not letters or first in (*GROUPS, *leaves(), *sections())
    if not is_override and (near := hint(first, BY_NAME)):
        raise UsageError(f"there is no command '{first}'; legal: {', '.join(BY_NAME)}{near}")
    return train_command(args, started_at)


# ---- help, made from the commands, conf/ and the texts of the schema -----------------------------

# The fields that help lists; docs/reference/configuration.md has all
COMMON = (
    *("seed", "device", "execution", "train.epochs", "train.max_steps", "train.max_time_s"),
    *("train.batch_size", "train.eval_batch_size", "train.lr", "train.clip_norm"),
    *("train.accumulate", "train.scheduler", "train.log_every", "train.checkpoint_every_steps"),
    *("precision.layers", "op_lists.lower_file", "op_lists.fp32_file", "op_lists.promote_file"),
    *("op_lists.strict", "op_lists.verbose", "loss_scale.value", "debug.fp_exceptions"),
    *("data.source", "data.root", "run.dir", "run.resume"),
)

INTRO = """\
mprun: train a model in a numerical precision, and measure what it costs and
what it saves.

  mprun recipe=fashion_mnist precision=bf16_mixed
  mprun recipe=mnist precision=fp32 seed=1 train.lr=2e-3
  mprun -m recipe=mnist precision=fp32,bf16_mixed seed=0,1,2       (a sweep)
  mprun recipe=my.py                        (a model of your own)
  mprun run.resume=last                     (resume the newest run)
"""

OTHER_NAMES = """\
  Lightning's names (bf16-mixed, 16-mixed, 32-true, ...) and Keras'
  (mixed_bfloat16, mixed_float16, float32, ...) are accepted for these.
"""

OWN_RECIPE = "Your model, in a file; my.py:NAME for one of several classes"

OUTRO = """\
Options: -m (run every combination of the values listed), --config-dir FOLDER
(a folder with recipe/*.yaml of your own), --show-config (print the resolved
configuration and stop), --version, --help.
Environment: MPRUN_DATA (folder of the data sets), NO_COLOR.
Exit status: 0 done, 1 the run failed, 2 usage or configuration, 3 a fail_if
condition, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM.
Your own model: docs/tutorials/your_model.md
Every field: docs/reference/configuration.md
"""


def show_help(commands: Sequence[tuple[str, str]]) -> None:
    """Print the help to standard output."""
    print(INTRO)
    print(_section("Commands (the first argument; mprun COMMAND --help)", commands))
    for group in GROUPS:
        own = [("path/to/my.py", OWN_RECIPE)] if group == "recipe" else []
        print(_section(f"{group}=", [*options(group).items(), *own]))
        if group == "precision":
            print(OTHER_NAMES)
    fields = leaves()
    rows = [(f"{key} = {fields[key].default_text}", fields[key].doc) for key in COMMON]
    print(_section("Common overrides and their defaults", rows))
    print(OUTRO, end="")


def show_command(text: str, sections: Sequence[str | type]) -> None:
    """Print the help of one command: its module's text and its settings."""
    print(text, end="\n\n")
    fields = settings.fields(sections) if sections else {}
    rows = [(f"{key} = {field.default_text}", field.doc) for key, field in fields.items()]
    if rows:
        print(_section("Settings and their defaults", rows))
    print("Overrides of a run: mprun --help", end="\n")


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A title over two columns; the second is wrapped to the terminal, the first is not."""
    column = max(14, *(len(name) for name, _ in rows)) + 4
    width = max(column + 30, get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * column
    lines = [title]
    for name, text in rows:
        wrapper.initial_indent = f"  {name}".ljust(column)
        lines.append(wrapper.fill(text))
    return "\n".join(lines) + "\n"


# ---- several processes: the first one carries a command out, the others train beside it ----------


def in_all_processes(command: Callable[[], int]) -> int:
    """The exit status of `command`, carried out with the other processes that torchrun started."""
    launch = launch_of()
    if launch.world_size == 1:  # without importing torch
        return command()
    # torch reads it once: DDP's and gloo's hints to programmers go to standard error
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from mprun.train.parallel.coordinator import coordinator_of

    try:
        with coordinator_of(launch) as coordinator:
            return command() if launch.rank == 0 else _follow(coordinator, launch)
    except MprunError as error:
        print(f"mprun: {printable(str(error))}", file=sys.stderr)
        return error.status


def _follow(coordinator: GroupCoordinator, launch: Launch) -> int:
    from mprun.train.parallel.ranks import PeerLostError
    from mprun.train.run import follow
    from mprun.train.signals import SignalReceivedError, StopSignals

    warnings.simplefilter("ignore")  # the first process shows them
    with StopSignals(patient=True) as stop, Path(os.devnull).open("w") as nothing:
        try:
            while (job := coordinator.next_job()) is not None:
                # the first process prints the same
                with redirect_stdout(nothing), redirect_stderr(nothing):
                    follow(job, stop, coordinator)
        except PeerLostError as error:
            if launch.rank == 1 and coordinator.is_connected:  # the first process cannot say it
                print(f"mprun: {error}", file=sys.stderr)
            return EXIT_FAILED
        except SignalReceivedError:
            return stop.exit_status
    return EXIT_OK
