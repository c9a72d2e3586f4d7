"""`mprun sweep`: every mode with every seed, then the comparison.

    mprun sweep recipe=mnist seeds=5
    mprun sweep recipe=mnist precision=fp32,bf16_mixed op_lists=none,hmp seeds=10
    mprun sweep recipe=mnist sweep.budget_min=30    (what fits into half an hour)
    mprun sweep recipe=mnist --verbose              (all figures and notes on the terminal)
    mprun sweep run.resume=outputs/DATE/TIME
    mprun sweep recipe=mnist seeds=10 launcher=joblib launcher.processes=4
    mprun sweep recipe=mnist hydra/launcher=submitit_slurm hydra.launcher.partition=gpu

Any number of processes may work on one study: each takes the next open run. The same command with
the same run.dir, or run.resume, in another terminal or on another machine helps. Runs that share a
machine at the same time have verdicts on the metric and none on time.

The runs go seed by seed over all modes. A run that fails is reported, and the others continue. The
exit status is 1 if a run failed to start, or if the machine ended it (a full disk, too little
memory); `run.resume` tries it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mprun.cli.arguments import Command
from mprun.cli.study_commands import (
    STUDY,
    budget_note,
    launcher_of,
    report_study,
    request_of,
    run_study,
    study_of,
    study_status,
)
from mprun.records.console import print_line, stderr_console
from mprun.study.budget import Budget

COMMAND = Command("sweep", ("sweep", "launcher", *STUDY))


def sweep_command(args: Sequence[str]) -> int:
    """Run `mprun sweep`; the exit status."""
    request = request_of(COMMAND, args, "sweep", "launcher")
    # It begins now: importing torch below is a part of it
    budget = Budget("sweep.budget_min", request.settings.sweep.budget_min)
    from mprun.cli.compare_command import compared
    from mprun.study.study import new_sweep

    launcher = launcher_of(request)
    errors = stderr_console()
    study = study_of(
        request, new_sweep, lambda name, why: print_line(errors, f"left out: {name}: {why}")
    )
    ran = run_study(study, launcher, budget, verbose=request.verbose)
    # All runs in the folder: other processes may have run some of them
    settings = request.settings.compare
    comparison = compared([study.folder], settings)
    notes = (*budget_note(study, ran, budget), *comparison.notes)
    comparison = replace(comparison, notes=notes, not_run=ran.not_run)
    report_study(study, comparison, settings, request.verbose)
    return study_status(ran.outcomes, comparison, settings.fail_if)
