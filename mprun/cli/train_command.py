"""`mprun [train]`: one run, or with -m one for every combination of the values listed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import EXIT_FAILED, EXIT_OK, MprunError, UsageError, hint

if TYPE_CHECKING:
    from mprun.config import Composed
    from mprun.records.run_record import Summary
    from mprun.train.signals import StopSignals

OPTIONS = ("--config-dir", "--multirun", "--show-config", "--help", "--version")


@dataclass(frozen=True)
class Arguments:
    """The command's words, taken apart."""

    overrides: tuple[str, ...]
    config_dir: Path | None = None
    show_config: bool = False
    multirun: bool = False


def parse(words: Sequence[str]) -> Arguments:
    """Separate overrides from the options.

    Raises:
        UsageError: an option that is not known, or lacks its value.
    """
    overrides, config_dir, flags = [], None, set()
    rest = iter(words)
    for word in rest:
        name, has_value, value = word.partition("=")
        if name == "--config-dir":
            config_dir = value if has_value else next(rest, None)
            if not config_dir:
                raise UsageError("--config-dir needs a folder")
        elif word in ("-m", "--multirun", "--show-config"):
            flags.add("--multirun" if word == "-m" else word)
        elif word.startswith("-"):
            raise UsageError(
                f"there is no option '{word}'; legal: {', '.join(OPTIONS)}{hint(word, OPTIONS)}"
            )
        else:
            overrides.append(word)
    return Arguments(
        tuple(overrides),
        Path(config_dir) if config_dir else None,
        "--show-config" in flags,
        "--multirun" in flags,
    )


def train(words: list[str]) -> int:
    """Compose, check, plan and run."""
    from mprun.config import compose

    arguments = parse(words)
    if arguments.multirun and arguments.show_config:
        raise UsageError("--show-config shows the configuration of one run; leave out -m")
    if arguments.multirun:
        return _sweep(arguments)
    composed = compose(arguments.overrides, arguments.config_dir)
    if arguments.show_config:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(composed.resolved), end="")
        return EXIT_OK
    return _catching_signals(composed)


def _catching_signals(composed: Composed) -> int:
    from mprun.train.signals import SignalReceivedError, StopSignals

    with StopSignals() as stop:
        try:
            return _run(composed, stop)
        except SignalReceivedError:
            print(f"mprun: stopped by {stop.name} before the run began", file=sys.stderr)
            return stop.exit_status


def _run(composed: Composed, stop: StopSignals) -> int:
    from mprun.assemble import plan
    from mprun.console import stdout_console, warn
    from mprun.run import run
    from mprun.train import checkpoint

    resume = composed.config.run.resume
    saved = checkpoint.load(Path(resume)) if resume is not None else None
    chosen = plan(composed.config, composed.given, saved["choices"] if saved else None)
    warn(chosen.warnings)
    return run(chosen, composed.resolved, stop, stdout_console(), saved)


def _sweep(arguments: Arguments) -> int:
    from mprun.config.multirun import sweep
    from mprun.records.run_record import dated_folder_if_used
    from mprun.train.signals import SignalReceivedError, StopSignals

    with StopSignals() as stop:
        try:
            folder = sweep(
                arguments.overrides, arguments.config_dir, dated_folder_if_used, sweep_job
            )
        except SignalReceivedError:
            print(f"mprun: stopped by {stop.name} between two runs", file=sys.stderr)
            return stop.exit_status
    return _show_sweep(folder)


class SweepStoppedError(BaseException):
    """A signal ended a run of a sweep, and with it the sweep; `status` is the exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def sweep_job(composed: Composed, folder: Path) -> int:
    """One run of a sweep. What fails in it is said, and leaves the other runs alone."""
    try:
        status = _catching_signals(composed)
    except MprunError as error:
        print(f"mprun: run {folder.name}: {error}", file=sys.stderr)
        return error.status
    if status not in (EXIT_OK, EXIT_FAILED):
        raise SweepStoppedError(status)
    return status


def _show_sweep(folder: Path) -> int:
    from mprun.console import stdout_console
    from mprun.records.run_record import read_summary
    from mprun.report.tables import sweep_table

    summaries: dict[str, Summary | None] = {}
    runs = [path for path in folder.iterdir() if path.is_dir()]
    for run in sorted(runs, key=lambda p: (len(p.name), p.name)):
        try:
            summaries[run.name] = read_summary(run)
        except MprunError:
            summaries[run.name] = None  # it ended before it had a record
    stdout_console().print(sweep_table(folder, summaries), highlight=False)
    done = all(s is not None and s.status == "completed" for s in summaries.values())
    return EXIT_OK if done else EXIT_FAILED
