"""`mprun check`: the gate of a training repository, on any CPU: does each mode train as it says?

    mprun check recipe=my.py
    mprun check recipe=my.py precision=fp32,bf16_mixed check.junit=check.xml
    mprun check recipe=my.py --update                  (writes mprun-baseline.json, for review)
    mprun check --observed FOLDER                      (what mprun.observe recorded)
    mprun check recipe=my.py --with torch==2.13.0      (module by module, beside this environment)
    mprun check recipe=my.py --python PATH             (the same, of an environment that you made)

Takes the overrides of a run, and `check.*` settings. In one process each mode is held against
float32, with tolerances that are measured on this model:

    trains     the loss falls            agrees    loss and gradients differ by roundings alone
    dtypes     all runs as it says       robust    nothing is near overflow, nothing is noise
    fits       check.memory_gib          baseline  nothing changed since mprun-baseline.json

Writes check.json into the run's folder; on GitHub also annotations and the summary of the job.
Status: 0, 1 for findings of severity error, 2 for usage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mprun.cli.arguments import Arguments, Command, parse_arguments
from mprun.errors import UsageError
from mprun.inspect.check.check_result import CheckSettings
from mprun.records.console import ReportPart
from mprun.records.result import Result, measuring, show
from mprun.train.signals import StopSignals, interruptible

COMMAND = Command("check", (CheckSettings,))


def check_command(args: Sequence[str]) -> int:
    """Run `mprun check`; the exit status."""
    from mprun.config.settings import take

    known = parse_arguments(COMMAND, args)
    taken, overrides = take(known.overrides, CheckSettings)
    settings = taken.own(CheckSettings)
    from mprun.inspect.check.check_reports import refuse_folder, write_reports

    refuse_folder(settings.junit)
    measure, wanted = _planned(known, overrides, settings)

    def check(stop: StopSignals) -> int:
        from mprun.records.files import new_folder

        folder = known.observed or new_folder(wanted)
        with measuring(folder) as report:
            result = measure(report)
        status = show(result, folder)
        write_reports(result, settings.junit)
        return status

    return interruptible(check, " before the first result")


def _planned(
    known: Arguments, overrides: Sequence[str], settings: CheckSettings
) -> tuple[Callable[[ReportPart], Result], str | None]:
    """What gives the result, and the folder that `run.dir` names.

    Raises:
        UsageError: the arguments do not fit together, or a mode cannot be planned.
    """
    from mprun.inspect.check import check, check_other_runs

    if known.observed is not None:
        if overrides or known.python or known.requirement:
            raise UsageError("--observed judges a record alone: leave out overrides and --python")
        folder = known.observed
        return lambda report: check_other_runs.check_observed(folder, settings, known.update), None
    other = known.python or known.requirement
    if other and (known.update or (known.python and known.requirement)):
        raise UsageError("--python and --with compare two environments: give one, without --update")
    texts = [*overrides, *(check_other_runs.ONE_STEP if other else ())]
    modes = check.plan_check(texts, known.config_dir, settings)
    wanted = modes[0].planned.composed.config.run.dir
    if not other:
        return lambda report: check.check_modes(modes, settings, known.update, report), wanted
    needed = known.requirement
    python = check_other_runs.environment_with(needed) if needed else [str(known.python)]
    return lambda report: check_other_runs.check_environment(modes, settings, python), wanted
