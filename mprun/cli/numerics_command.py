"""`mprun numerics`: what 16-bit formats do to a run's numbers, and which loss scale to take.

    mprun numerics recipe=mnist precision=fp16_mixed

Takes the overrides of a run, and `numerics.*` settings. Trains, collects statistics at some steps
and prints them. Writes `numerics.json` with everything, and plots, into the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.cli.arguments import parse_arguments
from mprun.cli.step_commands import introduce, traceback_in
from mprun.console import (
    JobProgress,
    print_line,
    print_table,
    print_text,
    stderr_console,
    stdout_console,
)
from mprun.errors import EXIT_FAILED, EXIT_OK
from mprun.train.signals import StopSignals, interruptible

if TYPE_CHECKING:
    from mprun.config import Composed
    from mprun.config.settings import NumericsSettings
    from mprun.experiments.recipe_numerics import InspectedSteps
    from mprun.results.numerics_result import NumericsResult


def numerics_command(args: Sequence[str]) -> int:
    """Run `mprun numerics`; the exit status."""
    from mprun.config import compose
    from mprun.config.settings import take

    known = parse_arguments("numerics", args)
    settings, overrides = take(known.overrides, "numerics")
    composed = compose(overrides, known.config_dir)
    return interruptible(
        lambda stop: _inspect(composed, settings.numerics, stop), " before the first result"
    )


def _inspect(composed: Composed, settings: NumericsSettings, stop: StopSignals) -> int:
    from mprun.experiments.planned_run import plan_run
    from mprun.experiments.recipe_numerics import recipe_numerics, steps_to_inspect
    from mprun.records.files import new_folder

    planned = plan_run(composed, "numerics")
    steps_to_inspect(planned.plan, settings)  # raises before a folder is made
    introduce(planned)
    console, folder = stdout_console(), new_folder(composed.config.run.dir)
    with JobProgress(stderr_console()) as progress, traceback_in(folder):
        content, inspected = recipe_numerics(planned, settings, stop, progress.begin)
    steps, skipped = inspected.steps, inspected.skipped
    _print(inspected.result, settings)
    names = _write(content, inspected, folder, settings.plots)
    print_line(
        console,
        f"inspected {len(steps)} of {steps[-1]} steps, {len(skipped)} of them skipped; "
        f"written: {folder}/{', '.join(names)}",
    )
    if (ended := inspected.ended) is not None:
        print_line(stderr_console(), f"the run ended early, its results are above: {ended}")
        return stop.exit_status if stop.requested() else EXIT_FAILED
    return EXIT_OK


def _print(result: NumericsResult, settings: NumericsSettings) -> None:
    from mprun.results.numerics_result import lost_table, rows_table, scales_table, sentences

    console = stdout_console()
    for line in sentences(result):
        print_text(console, line)
    further, top = [f.name for f in settings.formats], settings.top
    rows = rows_table(result, top, further)
    for table in (scales_table(result), rows, lost_table(result, top // 2)):
        print_table(console, table)


def _write(
    content: dict[str, Any], inspected: InspectedSteps, folder: Path, plots: bool
) -> list[str]:
    """Write numerics.json and the plots; the files' names."""
    from mprun.records.files import jsonable, write_files

    text = json.dumps(jsonable(content), indent=1, allow_nan=False)
    names = write_files(folder, {"numerics.json": f"{text}\n"})
    if not plots:
        return names
    from mprun.report.plots.measurement_plots import save_plots

    data = content["data"]
    title = f"{content['recipe']} in {content['variant']}, {data['name']} ({data['source']}), "
    title += f"{len(inspected.steps)} steps measured"
    return [*names, *save_plots(inspected.result, title, folder)]
