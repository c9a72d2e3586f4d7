"""`mprun numerics`: what formats make of a run's numbers, and which loss scale to take.

    mprun numerics recipe=mnist precision=fp16_mixed numerics.steps=20

Takes the overrides of a run, and settings of its own: `numerics.*`. Trains, looks at some steps,
prints what it found, and leaves in the run's folder `numerics.json`, the same whole, and pictures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.cli.step_commands import faults_explained, introduce, refuse_resume
from mprun.cli.train_command import parse
from mprun.errors import EXIT_FAILED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mprun.config import Composed
    from mprun.config.settings import NumericsSettings
    from mprun.records.numerics_record import NumericsResult
    from mprun.train.signals import StopSignals

SCHEMA_VERSION = 1
KEPT = (
    *("recipe", "seed", "precision", "variant", "effective", "execution"),
    *("data", "batch", "hardware", "versions"),
)
"""What numerics.json has of a summary."""


def numerics_command(words: Sequence[str]) -> int:
    """Run `mprun numerics` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the overrides, or a folder that holds something already.
        RunFailedError: the run failed before the first step to look at.
    """
    from mprun.config import compose
    from mprun.config.settings import take

    arguments = parse(words)
    if arguments.multirun or arguments.show_config:
        raise UsageError("mprun numerics looks at one run; leave out the option")
    settings, overrides = take(arguments.overrides, "numerics")
    composed = compose(overrides, arguments.config_dir)
    refuse_resume(composed, "numerics")
    return _catching_signals(composed, settings.numerics)


def _catching_signals(composed: Composed, settings: NumericsSettings) -> int:
    from mprun.train.loop import StopRequestedError
    from mprun.train.signals import SignalReceivedError, StopSignals

    with StopSignals() as stop:
        try:
            return _numerics(composed, settings, stop)
        except (SignalReceivedError, StopRequestedError):
            print(f"mprun: stopped by {stop.name} before anything was found", file=sys.stderr)
            return stop.exit_status


def _numerics(composed: Composed, settings: NumericsSettings, stop: StopSignals) -> int:
    import msgspec

    from mprun.assemble import plan
    from mprun.console import ProgressDisplay, print_line, stderr_console, stdout_console
    from mprun.experiments.recipe_numerics import inspect_steps, steps_to_inspect
    from mprun.precision import backend_flags
    from mprun.records.numerics_record import NumericsResult
    from mprun.records.run_record import new_folder

    chosen = plan(composed.config, composed.given)
    steps_to_inspect(chosen, settings)  # before a folder is made
    console, summary = stdout_console(), introduce(composed, chosen, "numerics")
    folder = new_folder(composed.config.run.dir)
    flags = backend_flags(chosen.policy, chosen.native_tf32)
    with faults_explained("numerics", folder), flags, stop.deferred():
        inspected = inspect_steps(chosen, settings, stop.requested, ProgressDisplay(console).status)
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **{key: value for key, value in asdict(summary).items() if key in KEPT},
        "steps": list(inspected.steps),
        "skipped": list(inspected.skipped),
        "ended": inspected.ended,
        **inspected.findings.as_dict(),
    }
    result = msgspec.convert(found, NumericsResult)
    names = _leave(found, result, folder, settings.plots)
    _show(result, settings.top, console)
    print_line(
        console,
        f"inspected {len(inspected.steps)} of {inspected.steps[-1]} steps, "
        f"{len(inspected.skipped)} of them skipped; written: {folder}/{', '.join(names)}",
    )
    if inspected.ended is not None:
        print_line(
            stderr_console(), f"the run ended early, its results are above: {inspected.ended}"
        )
        return stop.exit_status if stop.requested() else EXIT_FAILED
    return EXIT_OK


def _show(result: NumericsResult, top: int, console: Console) -> None:
    from mprun.console import print_line
    from mprun.report.numerics_tables import lost_table, rows_table, scales_table, sentences

    for line in sentences(result):
        print_line(console, line)
    for table in (scales_table(result), rows_table(result, top), lost_table(result, top // 2)):
        console.print(table, highlight=False)


def _leave(found: dict[str, Any], result: NumericsResult, folder: Path, plots: bool) -> list[str]:
    """Write numerics.json and the pictures; the files' names."""
    from mprun.records.run_record import jsonable

    text = json.dumps(jsonable(found), indent=1, allow_nan=False)
    (folder / "numerics.json").write_text(f"{text}\n", encoding="utf-8")
    if not plots:
        return ["numerics.json"]
    from mprun.report.plots.numerics_plots import save_plots

    data = found["data"]
    title = f"{found['recipe']} in {found['variant']}, {data['name']} ({data['source']}), "
    title += f"{len(found['steps'])} steps measured"
    return ["numerics.json", *save_plots(result, title, folder)]
