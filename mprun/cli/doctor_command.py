"""`mprun doctor`: what this machine runs natively, how fast, and what follows for each mode.

    mprun doctor [device=auto|cpu|cuda|xpu|mps|hpu] [doctor.budget_s=5] [doctor.json=true]
    mprun doctor recipe=mnist precision=bf16_mixed [doctor.steps=40]
    mprun doctor recipe=mnist doctor.world_size=8 [doctor.parallel=fsdp2]
    mprun doctor check [recipe=mnist] [device=cuda]

Measures for a few seconds. Prints tables, or with `doctor.json=true` one JSON object and nothing
else (`mprun.results.doctor_result` has its fields).

With a recipe it takes the overrides of a run, and shows the least time of the recipe's step at
these rates beside the measured one (`mprun.doctor.roofline`).

`check` compares the device's kernels with float64 on the CPU, in float32, bfloat16 and float16,
forward and backward: common layers, and the recipe's model. It names those that give NaN or a wrong
result, and then exits with status 3. A first run on an accelerator does so by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from mprun.cli.arguments import parse_arguments
from mprun.console import (
    JobProgress,
    ReportPart,
    print_line,
    print_table,
    print_text,
    report_nothing,
    stderr_console,
    stdout_console,
    warn,
)
from mprun.errors import EXIT_CONDITION, EXIT_OK, UsageError, hint

if TYPE_CHECKING:
    from mprun.config.settings import DoctorSettings
    from mprun.console.fitted_table import FittedTable
    from mprun.experiments.planned_run import PlannedRun
    from mprun.results.doctor_result import Examination
    from mprun.results.estimates import ScalingEstimate


CHECK = "check"


def doctor_command(args: Sequence[str]) -> int:
    """Run `mprun doctor`; the exit status."""
    from mprun.config.settings import of_several_processes, take

    overrides = parse_arguments("doctor", args).overrides
    settings, rest = take(overrides, "doctor")
    doctor = settings.doctor
    if CHECK in rest:
        return _check([text for text in rest if text != CHECK], doctor.json)
    if doctor.world_size == 1:
        warn(of_several_processes(overrides, "doctor.parallel", "doctor.links"))
    device, planned = _subject(rest)
    if planned is None and doctor.world_size > 1:
        raise UsageError(
            f"doctor.world_size={doctor.world_size} estimates a recipe's step: add recipe=NAME"
        )
    if doctor.json:
        examination = _examined(device, planned, doctor, report_nothing)
        print(json.dumps(asdict(examination), indent=1, allow_nan=False))
        return EXIT_OK
    print_line(stderr_console(), f"measuring for about {doctor.budget_s:g} s ...")
    with JobProgress(stderr_console()) as progress:
        examination = _examined(device, planned, doctor, progress.begin)
    for part in _parts(examination):
        print_part(part)
    return EXIT_OK


def _check(overrides: Sequence[str], as_json: bool) -> int:
    """Carry out `mprun doctor check`; the exit status."""
    from mprun.experiments.device_check import check_by_name
    from mprun.results.kernel_check_result import check_parts

    name, planned = _subject(overrides)
    with JobProgress(stderr_console()) as progress:
        check = check_by_name(name, planned, report_nothing if as_json else progress.begin)
    if as_json:
        print(json.dumps(asdict(check), indent=1, allow_nan=False))
    else:
        for part in check_parts(check):
            print_part(part)
    return EXIT_CONDITION if check.faults or not check.ops else EXIT_OK


def print_part(part: FittedTable | str) -> None:
    """Print a table or a sentence."""
    console = stdout_console()
    if isinstance(part, str):
        print_text(console, part)
    else:
        print_table(console, part)


def _subject(overrides: Sequence[str]) -> tuple[str, PlannedRun | None]:
    """The device to examine, and the run whose step is examined on it, if a recipe is named."""
    from mprun.config import compose
    from mprun.config.settings import fields

    keys = [text.lstrip("+").partition("=")[0] for text in overrides]
    if "recipe" in keys:
        from mprun.experiments.recipe_roofline import plan_step

        planned = plan_step(overrides)
        warn(planned.warnings)
        return planned.plan.device.type, planned
    for key, text in zip(keys, overrides, strict=True):
        if key != "device":
            legal = ["device", "recipe", *fields(["doctor"])]
            raise UsageError(
                f"mprun doctor does not take '{text}' without recipe=NAME{hint(key, legal)}; "
                f"legal: {', '.join(legal)}"
            )
    return compose(overrides).config.device, None


def _examined(
    device: str, planned: PlannedRun | None, settings: DoctorSettings, report: ReportPart
) -> Examination:
    from mprun.experiments.examine import examine

    if planned is None:
        return examine(device, settings.budget_s, report)
    keep_heap = planned.plan.config.speed.name != "plain"
    examination = examine(device, settings.budget_s, report, keep_heap)
    from mprun.experiments.recipe_roofline import recipe_formats, recipe_roofline

    examination = replace(
        examination,
        roofline=recipe_roofline(planned, examination, settings.steps, report),
        formats=recipe_formats(planned, [gpu.name for gpu in settings.gpus], report),
    )
    return replace(examination, scaling=_scaling(planned, examination, settings))


def _scaling(
    planned: PlannedRun, examination: Examination, settings: DoctorSettings
) -> ScalingEstimate | None:
    """The estimate for several processes, if several are asked for."""
    from mprun.experiments.recipe_roofline import recipe_scaling

    if settings.world_size == 1 or examination.roofline is None:
        return None
    return recipe_scaling(
        planned,
        examination.roofline,
        settings.parallel.value,
        settings.world_size,
        [link.name for link in settings.links],
    )


def _parts(examination: Examination) -> Iterator[FittedTable | str]:
    """The machine's tables, or those of the recipe's step on it."""
    from mprun.results.doctor_result import renderables
    from mprun.results.estimates import NO_FORMATS, format_parts, scaling_parts
    from mprun.results.roofline_result import roofline_parts

    if examination.roofline is None:
        yield from renderables(examination)
        return
    yield from roofline_parts(examination.roofline)
    if not examination.formats:
        yield NO_FORMATS
    for gains in examination.formats or ():
        yield from format_parts(gains)
    if examination.scaling is not None:
        yield from scaling_parts(examination.scaling)
