"""`mprun check`: the gate of a training repository, on any CPU: does each mode train as it says?

    mprun check recipe=my.py
    mprun check recipe=my.py precision=fp32,bf16_mixed check.junit=check.xml
    mprun check recipe=my.py --update                  (writes mprun-baseline.json, for review)

Takes the overrides of a run, and `check.*` settings. In one process each mode is held against
float32: it must train, agree with float32 by what its roundings explain, run in the dtypes that it
says, stay away from overflow and noise, and fit into memory. Writes check.json into the run's
folder. Status: 0, 1 for findings of severity error, 2 for usage.
"""

from __future__ import annotations

from collections.abc import Sequence

from mprun.cli.arguments import Command, parse_arguments
from mprun.results import measuring, show
from mprun.results.check_result import CheckSettings
from mprun.train.signals import StopSignals, interruptible

COMMAND = Command("check", (CheckSettings,))


def check_command(args: Sequence[str]) -> int:
    """Run `mprun check`; the exit status."""
    from mprun.config.settings import take

    known = parse_arguments(COMMAND, args)
    taken, overrides = take(known.overrides, CheckSettings)
    settings = taken.own(CheckSettings)
    from mprun.results.check_reports import refuse_folder, tell_others

    refuse_folder(settings.junit)
    from mprun.inspect.check import plan_check

    modes = plan_check(overrides, known.config_dir, settings)

    def check(stop: StopSignals) -> int:
        from mprun.inspect.check import check_modes
        from mprun.records.files import new_folder

        folder = new_folder(modes[0].planned.composed.config.run.dir)
        with measuring(folder) as report:
            result = check_modes(modes, settings, known.update, report)
        status = show(result, folder)
        tell_others(result, settings.junit)
        return status

    return interruptible(check, " before the first result")
