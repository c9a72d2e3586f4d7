"""`mprun numerics`: what 16-bit formats do to a run's numbers, and which loss scale to take.

    mprun numerics recipe=mnist precision=fp16_mixed

Takes the overrides of a run, and `numerics.*` settings. Trains, collects statistics at some steps
and prints them. Writes `numerics.json` with everything, and plots, into the run's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command, parse_arguments
from mprun.inspect.numerics_result import NumericsSettings
from mprun.records.result import measuring, show
from mprun.train.signals import StopSignals, interruptible

if TYPE_CHECKING:
    from mprun.config import Composed

COMMAND = Command("numerics", (NumericsSettings,))


def numerics_command(args: Sequence[str]) -> int:
    """Run `mprun numerics`; the exit status."""
    from mprun.config import compose
    from mprun.config.settings import take

    known = parse_arguments(COMMAND, args)
    settings, overrides = take(known.overrides, NumericsSettings)
    composed = compose(overrides, known.config_dir)
    return interruptible(
        lambda stop: _inspect(composed, settings.own(NumericsSettings), stop),
        " before the first result",
    )


def _inspect(composed: Composed, settings: NumericsSettings, stop: StopSignals) -> int:
    from mprun.cli.run_view import introduce
    from mprun.inspect.numerics_of_steps import recipe_numerics, steps_to_inspect
    from mprun.records.files import new_folder
    from mprun.study.planned_run import plan_run

    planned = plan_run(composed, "numerics")
    steps_to_inspect(planned.plan, settings)  # raises before a folder is made
    introduce(planned)
    folder = new_folder(composed.config.run.dir)
    with measuring(folder) as report:
        result = recipe_numerics(planned, settings, stop, report)
    return show(result, folder)
