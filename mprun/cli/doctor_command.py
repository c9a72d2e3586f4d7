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
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import UsageError, hint
from mprun.records.console import print_line, report_nothing, stderr_console, warn
from mprun.records.result import Result, measuring, show
from mprun.train.machine.doctor_result import DoctorSettings

if TYPE_CHECKING:
    from mprun.study.planned_run import PlannedRun

COMMAND = Command("doctor", (DoctorSettings,))


def doctor_command(args: Sequence[str]) -> int:
    """Run `mprun doctor`; the exit status."""
    from mprun.config.settings import take

    known = parse_arguments(COMMAND, args)
    settings, rest = take(known.overrides, DoctorSettings)
    doctor = settings.own(DoctorSettings)
    device, planned = _subject(rest, known.config_dir)
    from mprun.inspect.step_roofline import examined

    if not doctor.json:
        print_line(stderr_console(), f"measuring for about {doctor.budget_s:g} s ...")
    with nullcontext(report_nothing) if doctor.json else measuring() as report:
        result = examined(device, planned, doctor, report)
    return _show_json(result) if doctor.json else show(result)


def _show_json(result: Result) -> int:
    print(result.json, end="")
    return result.status


def _subject(overrides: Sequence[str], config_dir: Path | None) -> tuple[str, PlannedRun | None]:
    """The device to examine, and the run whose step is examined on it, if a recipe is named."""
    from mprun.config import compose
    from mprun.config.settings import fields

    keys = [text.lstrip("+").partition("=")[0] for text in overrides]
    if "recipe" in keys:
        from mprun.inspect.step_roofline import plan_step

        planned = plan_step(overrides, config_dir)
        warn(planned.warnings)
        return planned.plan.device.type, planned
    for key, text in zip(keys, overrides, strict=True):
        if key != "device":
            legal = ["device", "recipe", *fields([DoctorSettings])]
            raise UsageError(
                f"mprun doctor does not take '{text}' without recipe=NAME{hint(key, legal)}; "
                f"legal: {', '.join(legal)}"
            )
    return compose(overrides, config_dir).config.device, None
