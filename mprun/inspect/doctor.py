"""`mprun doctor`: what this machine runs natively, how fast, and what follows for each mode.

    mprun doctor [device=auto|cpu|cuda|xpu|mps|hpu] [doctor.budget_s=5] [doctor.json=true]
    mprun doctor recipe=mnist precision=bf16_mixed [doctor.steps=40]

Measures for a few seconds. Prints tables, or with `doctor.json=true` one JSON object and nothing
else (`mprun.train.machine.doctor_result` has its fields).

With a recipe it takes the overrides of a run, and shows the least time of the recipe's step at
these rates beside the measured one, and whether formats of 8 bits or fewer pay for its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import UsageError, hint
from mprun.inspect.question import Given, Prepared, Question
from mprun.records.console import ReportPart, print_line, report_nothing, stderr_console
from mprun.records.result import Result
from mprun.train.machine.doctor_result import (
    DoctorSettings,
    format_parts,
    renderables,
    roofline_parts,
)

if TYPE_CHECKING:
    from mprun.records.console.fitted_table import FittedTable
    from mprun.study.planned_run import PlannedRun


def prepare(given: Given) -> Prepared:
    """The device to examine, or the run whose step is examined on it, if a recipe is named.

    Raises:
        UsageError: an argument cannot be used, or the run cannot be planned.
    """
    settings, overrides = given.settings(DoctorSettings), given.overrides
    planned = None
    if "recipe" in map(_key_of, overrides):
        planned = plan_step(overrides, given.config_dir)
        device = planned.plan.device.type
    else:
        device = _device(overrides, given.config_dir)
    if not settings.json:  # on standard error: a pipe gets the tables alone
        print_line(stderr_console(), f"measuring for about {settings.budget_s:g} s ...")
    return Prepared(
        lambda m: examined(device, planned, settings, m.report),
        warnings=planned.warnings if planned else (),
        as_json=settings.json,
    )


def _key_of(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _device(overrides: Sequence[str], config_dir: Path | None) -> str:
    """The device that the overrides name; without a recipe they may name nothing else."""
    from mprun.config import compose
    from mprun.config.settings import fields

    for text in overrides:
        if (key := _key_of(text)) != "device":
            legal = ["device", "recipe", *fields([DoctorSettings])]
            raise UsageError(
                f"mprun doctor does not take {text!r} without recipe=NAME{hint(key, legal)}; "
                f"legal: {', '.join(legal)}"
            )
    return compose(overrides, config_dir).config.device


def plan_step(overrides: Sequence[str], config_dir: Path | None = None) -> PlannedRun:
    """Plan a run whose step is examined, on generated data unless the user chose others.

    The time of a step does not depend on the values of its samples.

    Raises:
        UsageError: the run cannot be planned.
    """
    from mprun.config import compose
    from mprun.study.planned_run import plan_run

    if any(text.lstrip("+~").startswith("data.") for text in overrides):
        return plan_run(compose(overrides, config_dir), "doctor")
    composed = compose([*overrides, "data.source=generated"], config_dir)
    # the user did not ask for the source: a recipe without one gives no warning
    given = tuple(key for key in composed.given if key != "data.source")
    return plan_run(replace(composed, given=given), "doctor")


def examined(
    device: str,
    planned: PlannedRun | None,
    settings: DoctorSettings,
    report: ReportPart = report_nothing,
) -> Result:
    """The examination of a machine, or of the step of the run `planned` on it."""
    from mprun.inspect.machine_examination import examine
    from mprun.inspect.step_roofline import measure_formats, recipe_roofline
    from mprun.train.machine.conditions import steady_heap

    # a step of speed=plain is timed with the page faults of the allocator as it is
    if planned is None or planned.plan.config.speed.name != "plain":
        steady_heap()
    examination = examine(device, settings.budget_s, report)
    if planned is None:
        return Result(examination, list(renderables(examination)))
    roofline, step = recipe_roofline(planned, examination, settings.steps, report)
    gains = measure_formats(step, planned.plan.device, report)
    parts: list[FittedTable | str] = [*roofline_parts(roofline)]
    parts += [gains] if isinstance(gains, str) else format_parts(gains)
    formats = [] if isinstance(gains, str) else [gains]
    return Result(replace(examination, roofline=roofline, formats=formats), parts)


QUESTION = Question("doctor", prepare, (DoctorSettings,))
