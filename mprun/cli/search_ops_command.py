"""`mprun search-ops`: which ops must stay in float32, and the op list that keeps them there.

    mprun search-ops recipe=mnist precision=fp16_mixed
    mprun search-ops recipe=mnist search_ops.budget_min=10    (what ten minutes can settle)

Takes the overrides of a run, and settings (`search_ops.tolerance=0.005`, `seeds=3`). Writes into
the run's folder `ops.yaml`, which `op_lists.lower_file` and `op_lists.fp32_file` read,
`search_ops.json` with every measurement, and `snippets/`, the result as code for other training
loops. Ctrl-C ends it with what was measured. See docs/reference/search-ops.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command, parse_arguments
from mprun.console import print_line, stdout_console
from mprun.errors import EXIT_OK, RunFailedError
from mprun.experiments.budget import Budget, BudgetSignals, EndedEarlyError, LimitedParts
from mprun.results import measuring, show, show_part
from mprun.train.signals import SignalReceivedError, interruptible

if TYPE_CHECKING:
    from mprun.config.settings import Settings

COMMAND = Command("search-ops", ("search_ops", "seeds"))


def search_ops_command(args: Sequence[str]) -> int:
    """Run `mprun search-ops`; the exit status."""
    from mprun.config.settings import take

    known = parse_arguments(COMMAND, args)
    settings, overrides = take(known.overrides, "search_ops", "seeds")
    if not {"precision", "op_lists"} & {text.lstrip("+").partition("=")[0] for text in overrides}:
        overrides = [*overrides, "precision=bf16_mixed"]
    stop = BudgetSignals(Budget("search_ops.budget_min", settings.search_ops.budget_min))
    return interruptible(
        lambda _: _search(overrides, known.config_dir, settings, stop),
        " before the first result",
        stop,
    )


def _search(
    overrides: list[str], config_dir: Path | None, settings: Settings, stop: BudgetSignals
) -> int:
    from mprun.cli.run_view import introduce
    from mprun.inspect.search import plan_search
    from mprun.records.files import new_folder, write_files

    planned = plan_search(overrides, config_dir, settings)
    introduce(planned.low)
    console = stdout_console()
    for note in planned.notes():
        print_line(console, note)
    folder = new_folder(planned.low.composed.config.run.dir)
    with stop.deferred():
        with measuring(folder) as report:
            try:
                found = planned.measure(LimitedParts(stop, report))
            except EndedEarlyError:
                raise _nothing_measured(stop) from None
        measured = found.measured()
        for part in measured.parts:
            show_part(part)
        # before the proof, which takes long: a crash loses nothing that was measured
        write_files(folder, measured.files)
        if settings.search_ops.steps:
            with measuring() as report:
                found.prove(LimitedParts(stop, report))
        show(found.proved(), folder)
        use = found.overrides(overrides, folder)
        if use is not None:
            own = [] if config_dir is None else ["--config-dir", str(config_dir)]
            print_line(console, f"use it: {shlex.join(['mprun', *own, *use])}")
    return EXIT_OK if stop.received is None else stop.exit_status


def _nothing_measured(stop: BudgetSignals) -> BaseException:
    if stop.received is not None:
        return SignalReceivedError()
    return RunFailedError(
        f"{stop.name} ended the search before its first result: give it more time"
    )
