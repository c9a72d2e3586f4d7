"""`mprun check`: the gate of a training repository, on any CPU: does each mode train as it says?

    mprun check recipe=my.py
    mprun check recipe=my.py precision=fp32,bf16_mixed check.junit=check.xml
    mprun check recipe=my.py --update                  (writes mprun-baseline.json, for review)
    mprun check --observed FOLDER                      (what mprun.observe recorded)

Takes the overrides of a run, and `check.*` settings. In one process each mode is compared with
float32, with tolerances that are measured on this model:

    trains     the loss falls            agrees    loss and gradients differ by roundings alone
    dtypes     all runs as it says       robust    nothing is near overflow, nothing is noise
    fits       check.memory_gib          baseline  nothing changed since mprun-baseline.json

Writes check.json into the run's folder; on GitHub also annotations and the summary of the job.
Status: 0, 1 for findings of severity error, 2 for usage.
"""

from __future__ import annotations

from pathlib import Path

from mprun.errors import UsageError
from mprun.inspect.check.check_result import CheckSettings, refuse_folder, write_reports
from mprun.inspect.question import Given, Measuring, Prepared, Question
from mprun.records.result import Result


def prepare(given: Given) -> Prepared:
    """What gives the result: modes, or a record.

    Raises:
        UsageError: the arguments do not fit together, or a mode cannot be planned.
    """
    from mprun.inspect.check.check import check_modes, plan_check
    from mprun.inspect.check.check_other_runs import check_observed

    settings, known = given.settings(CheckSettings), given.options
    refuse_folder(settings.junit)

    def report_to_ci(result: Result, _: Path | None) -> None:
        write_reports(result, settings.junit)

    if known.observed is not None:
        if given.overrides:
            raise UsageError("--observed judges a record alone: leave out overrides")
        return Prepared(
            lambda _: check_observed(known.observed, settings, known.update),
            folder=known.observed,
            after=report_to_ci,
        )
    modes = plan_check(given.overrides, given.config_dir, settings)

    def measure(measuring: Measuring) -> Result:
        return check_modes(modes, settings, known.update, measuring.report)

    return Prepared(measure, modes[0].planned.composed, after=report_to_ci)


QUESTION = Question("check", prepare, (CheckSettings,))
