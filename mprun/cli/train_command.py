"""`mprun train`, the default command: one run, or with `-m` one for each combination."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command, parse_arguments
from mprun.cli.standard_streams import patient_streams
from mprun.errors import EXIT_FAILED, EXIT_OK, MprunError, StoppedError, UsageError
from mprun.records.console import RunProgress, print_line, print_table, stdout_console, warn
from mprun.records.files import launch_of
from mprun.records.result import Result, show
from mprun.records.run_record import Summary, read_summary
from mprun.study.report import tables
from mprun.train.callbacks import Progress
from mprun.train.signals import StopSignals, interruptible
from mprun.train.stopwatch import Stopwatch

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from mprun.config import Composed
    from mprun.train.assemble import Plan


class RunView(Progress):
    """Prints a header before the run of a plan, its progress and its messages."""

    def __init__(self, console: Console, plan: Plan) -> None:
        limits, steps = plan.limits, plan.planned_steps
        super().__init__(RunProgress(console, limits.epochs, steps), steps, limits.max_time_s)
        self._console, self._plan = console, plan

    def on_start(self, summary: Summary, folder: Path) -> None:
        super().on_start(summary, folder)
        for line in (*tables.header(summary), f"record: {folder}"):
            print_line(self._console, line)
        if self._plan.weights.state:
            print_line(self._console, f"weights: {self._plan.config.train.init_from}")

    def on_train_start(self, model: nn.Module, elapsed_s: float) -> None:
        if rows := self._plan.layer_rows(model):
            print_table(self._console, tables.layers(rows))
        super().on_train_start(model, elapsed_s)

    def on_message(self, text: str) -> None:
        print_line(self._console, text)


def train_command(args: Sequence[str], started_at: float | None = None) -> int:
    """Run `mprun train`; the exit status."""
    # started_at: the `time.perf_counter` at which the user began to wait; None for now
    from mprun.config import compose

    watch = Stopwatch(started_at)
    known = parse_arguments(TRAIN, args)
    if known.multirun and known.show_config:
        raise UsageError("--show-config shows the configuration of one run; leave out -m")
    if known.multirun:
        from mprun.config.multirun import sweep

        given = (known.overrides, known.config_dir)
        return interruptible(lambda _: show_sweep(sweep(*given, sweep_job)), " between two runs")
    composed = compose(known.overrides, known.config_dir)
    if known.show_config:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(composed.resolved), end="")
        return EXIT_OK
    return _run(composed, watch)


TRAIN = Command(
    "train",
    train_command,
    """`mprun [train]`: train one recipe in one precision; the default command.

        mprun recipe=fashion_mnist precision=bf16_mixed

    With `-m` it trains once for every combination of the listed values.
    """,
)


def _run(composed: Composed, watch: Stopwatch) -> int:
    # torchrun passes on Ctrl-C, which the processes had from the terminal already
    signals = StopSignals(patient=launch_of().world_size > 1)
    when = " before the run started"
    return interruptible(lambda stop: _train(composed, stop, watch), when, signals)


def _train(composed: Composed, stop: StopSignals, watch: Stopwatch) -> int:
    from mprun.study.planned_run import plan_or_resume
    from mprun.train.run import run

    plan, saved = plan_or_resume(composed)
    warn(plan.warnings)
    console = stdout_console()
    if plan.speed_reason is not None:
        print_line(console, plan.speed_reason)
    view = RunView(console, plan)
    summary, folder = run(plan, composed.resolved, stop, [view], saved, watch)
    show(Result(summary, tables.closing(summary)))
    if summary.status == "completed":
        return EXIT_OK
    again = shlex.quote(f"run.resume={folder}")
    print_line(console, f"stopped by {stop.name}; resume with: mprun {again}")
    return stop.exit_status


def sweep_job(composed: Composed, folder: Path) -> int:
    """One run of a sweep. Its failure is printed, and the other runs continue."""
    try:
        with patient_streams():  # a launcher may run it in a process of its own
            status = _run(composed, Stopwatch())
    except MprunError as error:
        print(f"mprun: run {folder.name}: {error}", file=sys.stderr)
        return error.status
    if status not in (EXIT_OK, EXIT_FAILED):  # a signal: it ends the sweep, not this run alone
        raise StoppedError(status)
    return status


def show_sweep(folder: Path) -> int:
    """Print the table of a sweep's runs; the exit status."""
    from mprun.records.run_folder import TRACKERS

    summaries: dict[str, Summary | None] = {}
    folders = [p for p in folder.iterdir() if p.is_dir() and p.name != TRACKERS]
    runs = [p for p in folders if not p.name.startswith(".")]  # a launcher's own
    for run in sorted(runs, key=lambda p: (len(str(p)), str(p))):  # 2 before 10
        name = str(run.relative_to(folder))
        try:
            summaries[name] = read_summary(run)
        except MprunError:
            summaries[name] = None  # the run ended before it had a record
    print_table(stdout_console(), tables.sweep_table(folder, summaries))
    done = all(s is not None and s.status == "completed" for s in summaries.values())
    return EXIT_OK if done else EXIT_FAILED
