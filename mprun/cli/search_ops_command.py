"""`mprun search-ops`: which ops must stay in float32, and the op list that keeps them there.

    mprun search-ops recipe=mnist precision=fp16_mixed
    mprun search-ops recipe=mnist search_ops.budget_min=10    (what ten minutes can settle)

Takes the overrides of a run, and settings (`search_ops.tolerance=0.005`). Writes into the run's
folder `ops.yaml`, which `op_lists.lower_file` and `op_lists.fp32_file` read, or `layers.yaml` for
`precision.layers_file`, and `search_ops.json` with every measurement. Ctrl-C ends it with what was
measured. See docs/reference/search-ops.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import EXIT_OK, RunFailedError
from mprun.inspect.search_result import FILE, SearchOpsSettings
from mprun.records.console import print_line, stdout_console
from mprun.records.result import measuring, show
from mprun.study.budget import Budget, BudgetSignals, EndedEarlyError, LimitedParts
from mprun.train.signals import SignalReceivedError, interruptible

COMMAND = Command("search-ops", (SearchOpsSettings,))


def search_ops_command(args: Sequence[str]) -> int:
    """Run `mprun search-ops`; the exit status."""
    from mprun.config.settings import take

    known = parse_arguments(COMMAND, args)
    all_settings, overrides = take(known.overrides, SearchOpsSettings)
    settings = all_settings.own(SearchOpsSettings)
    if not {"precision", "op_lists"} & {text.lstrip("+").partition("=")[0] for text in overrides}:
        overrides = [*overrides, "precision=bf16_mixed"]
    stop = BudgetSignals(Budget("search_ops.budget_min", settings.budget_min))
    return interruptible(
        lambda _: _search(overrides, known.config_dir, settings, stop),
        " before the first result",
        stop,
    )


def _search(
    overrides: list[str], config_dir: Path | None, settings: SearchOpsSettings, stop: BudgetSignals
) -> int:
    from mprun.cli.run_view import introduce
    from mprun.inspect.search import plan_search
    from mprun.records.files import new_folder

    planned = plan_search(overrides, config_dir, settings)
    introduce(planned.low)
    console = stdout_console()
    for note in planned.notes():
        print_line(console, note)
    folder = new_folder(planned.low.composed.config.run.dir)
    with stop.deferred():  # a signal ends the search at the next part, with what was measured
        with measuring(folder) as report:
            try:
                result = planned.measure(LimitedParts(stop, report))
            except EndedEarlyError:
                raise _nothing_measured(stop) from None
        show(result, folder)
        files = [name for name in result.files if name != FILE]
        if files:
            own = [] if config_dir is None else ["--config-dir", str(config_dir)]
            use = planned.overrides(overrides, files, folder)
            print_line(console, f"use it: {shlex.join(['mprun', *own, *use])}")
    return EXIT_OK if stop.received is None else stop.exit_status


def _nothing_measured(stop: BudgetSignals) -> BaseException:
    if stop.received is not None:
        return SignalReceivedError()
    return RunFailedError(
        f"{stop.name} ended the search before its first result: give it more time"
    )
