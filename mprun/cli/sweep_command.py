"""`mprun sweep`: every mode with every seed, then the comparison.

    mprun sweep recipe=mnist seeds=5
    mprun sweep recipe=mnist precision=fp32,bf16_mixed op_lists=none,hmp seeds=10
    mprun sweep run.resume=outputs/DATE/TIME

Seeds go round all modes. A run that fails is reported, and the others continue. The exit status is
1 where a run failed to start.
"""

from __future__ import annotations

from collections.abc import Sequence

from mprun.cli.study_commands import request_of, run_study
from mprun.console import print_line, stderr_console
from mprun.errors import EXIT_FAILED, EXIT_OK


def sweep_command(args: Sequence[str]) -> int:
    """Run `mprun sweep`; the exit status.

    Raises:
        UsageError: anything wrong with the overrides, or a folder that holds something already.
    """
    request = request_of("sweep", args)
    from mprun.cli.compare_command import compared, conclude
    from mprun.experiments.study import new_sweep, resumed_study

    if request.resume is not None:
        study = resumed_study("sweep", request.resume)
    else:
        study = new_sweep(request)
        for name, reason in study.plan.not_tried.items():
            print_line(stderr_console(), f"left out: {name}: {reason}")
    outcomes, status = run_study(study)
    if status is not None:
        return status
    settings = request.settings.compare
    conclude(compared([study.folder], settings), settings, study.folder)
    return EXIT_FAILED if any(o.summary is None for o in outcomes) else EXIT_OK
