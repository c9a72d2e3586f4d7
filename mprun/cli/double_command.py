"""`mprun double`: is a doubled batch worth it?

    mprun double recipe=mnist precision=bf16_mixed
    mprun double recipe=fashion_mnist precision=half_sr double.until_oom=true    (CUDA)

Compares the base batch with twice its size and each learning-rate rule, after equal epochs, paired
by seed, on validation data. --verbose shows all figures and notes. With `double.until_oom=true` it
searches the largest batch that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command
from mprun.cli.study_commands import (
    STUDY,
    for_choice,
    launcher_of,
    report_study,
    request_of,
    run_study,
    study_of,
    study_status,
)
from mprun.records.result import measuring, show
from mprun.study.budget import Budget

if TYPE_CHECKING:
    from mprun.config.settings import StudyRequest

COMMAND = Command("double", ("double", *STUDY))


def double_command(args: Sequence[str]) -> int:
    """Run `mprun double`; the exit status."""
    request = request_of(COMMAND, args, "double", refused=("compare.baseline", "compare.split"))
    from mprun.cli.compare_command import compared
    from mprun.study.double import double, new_double_study

    if request.settings.double.until_oom:
        return _largest_batch(request)
    study = study_of(request, new_double_study)
    # Without a budget: the question needs every pair of runs
    ran = run_study(study, launcher_of(request), Budget(), verbose=request.verbose)
    settings = for_choice(request, study, ran.outcomes)
    comparison = compared([study.folder], settings)
    doubling = double(comparison)
    answer = f"{doubling.answer}: {doubling.reason}"
    report_study(study, comparison, settings, request.verbose, answer)
    return study_status(ran.outcomes, comparison, settings.fail_if)


def _largest_batch(request: StudyRequest) -> int:
    from mprun.study.double import largest_batch

    margin = request.settings.double.headroom
    with measuring() as report:
        result = largest_batch(request.overrides, request.config_dir, margin, report)
    return show(result)
