"""`mprun check`: the gate of a training repository, on any CPU: does each mode train as it says?

    mprun check recipe=my.py
    mprun check recipe=my.py precision=fp32,bf16_mixed check.junit=check.xml
    mprun check recipe=my.py --update                  (writes mprun-baseline.json, for review)

Takes the overrides of a run, and `check.*` settings. In one process each mode is compared with
float32, with tolerances that are measured on this model:

    trains     the loss falls            agrees    loss and gradients differ by roundings alone
    dtypes     all runs as it says       robust    nothing is near overflow, nothing is noise
    fits       check.memory_gib          baseline  nothing changed since mprun-baseline.json

Writes check.json into the run's folder; on GitHub also annotations and the summary of the job.
Status: 0, 1 for findings of severity error, 2 for usage, 4 where a check was not done.
"""

from __future__ import annotations

from mprun.inspect.check.check_result import CheckSettings, refuse_folder, write_reports
from mprun.inspect.question import Given, Prepared, Question


def prepare(given: Given) -> Prepared:
    """What gives the result: the modes.

    Raises:
        UsageError: a setting is not legal, or a mode cannot be planned.
    """
    from mprun.inspect.check.check import check_modes, plan_check

    settings, update = given.settings(CheckSettings), given.options.update
    refuse_folder(settings.junit)
    modes = plan_check(given.overrides, given.config_dir, settings)
    return Prepared(
        lambda measuring: check_modes(modes, settings, update, measuring.report),
        modes[0].planned.composed,
        after=lambda result, _: write_reports(result, settings.junit),
    )


QUESTION = Question("check", prepare, (CheckSettings,))
