"""What `sweep`, `advise` and `double` have in common: arguments, runs, comparison, report.

They differ in their trials and in the sentence that answers.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import EXIT_FAILED, EXIT_OK, StoppedError
from mprun.records.console import note, print_line, stderr_console, stdout_console
from mprun.records.console.formatting import by_reason
from mprun.study.budget import Budget, BudgetSignals, not_run_text

if TYPE_CHECKING:
    from mprun.config.settings import CompareSettings, StudyRequest
    from mprun.study.compare.comparison import Comparison
    from mprun.study.hydra_launch import Screening, StudyLauncher
    from mprun.study.study import Study, StudyResult
    from mprun.study.study_progress import StudyProgress
    from mprun.study.trials import Outcome


STUDY = ("compare", "seeds", "first_seed")  # Sections that every study takes


def request_of(
    command: Command, args: Sequence[str], *sections: str, refused: Sequence[str] = ()
) -> StudyRequest:
    """The arguments of a study; see `study_request`."""
    from mprun.config.settings import study_request

    known = parse_arguments(command, args)
    request = study_request(
        command.name, known.overrides, known.config_dir, *sections, refused=refused
    )
    if request.listed_seeds:  # `seed=1,2` is Hydra's way; a study has a setting of its own
        seeds = ", ".join(map(str, request.listed_seeds))
        note(f"each variant is trained with the seeds {seeds}; seeds=N is short for 0 to N-1")
    return replace(request, verbose=known.verbose)


def launcher_of(request: StudyRequest, needs_times: str = "") -> StudyLauncher:
    """Which of Hydra's launchers runs the study; see `check_launcher`."""
    from mprun.study.hydra_launch import StudyLauncher, check_launcher

    launcher = StudyLauncher(request.settings.launcher, request.hydra)
    check_launcher(launcher, needs_times)
    return launcher


def study_of(
    request: StudyRequest,
    new: Callable[[StudyRequest], Study],
    report: Callable[[str, str], None] = lambda name, reason: None,
) -> Study:
    """The study to resume, or a new one.

    Args:
        request: the arguments.
        new: makes a new study.
        report: called with names and reason of the variants that a new study leaves out.
    """
    from mprun.study.study import resumed_study

    if request.resume is not None:
        return resumed_study(request.command, request.resume, request.trust)
    study = new(request)
    for reason, names in by_reason(study.plan.not_tried).items():
        report(", ".join(names), reason)
    return study


def run_study(
    study: Study,
    launcher: StudyLauncher,
    budget: Budget,
    screening: Screening | None = None,
    verbose: bool = False,
) -> StudyResult:
    """Run a study's trials; what was run.

    Args:
        study: the study.
        launcher: which processes run it.
        budget: its time.
        screening: how variants are dropped; None if none is.
        verbose: whether each warning of a run is shown when it begins.

    Raises:
        StoppedError: a signal ended it, or no run was completed.
    """
    from mprun.study.hydra_launch import run_launched
    from mprun.study.study_progress import StudyProgress
    from mprun.train.signals import SignalReceivedError

    plan = study.plan
    variants, seeds = list(plan.variants), len(plan.seeds)
    progress = StudyProgress(stdout_console(), variants, seeds, launcher.count, verbose)
    progress.line(f"{plan.command}: {len(study.trials)} runs in {study.folder}")
    stop = BudgetSignals(budget)
    with stop:  # a signal ends a run between two steps, with a checkpoint
        progress.start()
        try:
            result = run_launched(study, launcher, stop, progress, screening)
        except (StoppedError, SignalReceivedError):
            progress.line(f"stopped by {stop.name}; resume with: {study.resume_command}")
            raise StoppedError(stop.exit_status) from None
        finally:
            progress.stop()
    _show_failures(study, result, budget, progress)
    return result


def _show_failures(
    study: Study, result: StudyResult, budget: Budget, progress: StudyProgress
) -> None:
    """Show which runs the machine ended and which did not start.

    Raises:
        StoppedError: no run was completed.
    """
    outcomes = result.outcomes
    # no fault of a mode: a full disk or too little memory says nothing about its precision
    ended = [o for o in outcomes if o.by_machine]
    if ended:
        progress.line(
            f"{len(ended)} of {len(outcomes)} runs were ended by the machine and are no result: "
            f"{ended[0].error}; try them again with: {study.resume_command}"
        )
    # A wrong setting fails in every run alike: one line for each reason
    unstarted = Counter(o.error for o in outcomes if o.summary is None and not o.by_machine)
    for reason, count in unstarted.items():
        progress.line(f"{count} of {len(outcomes)} runs failed to start: {reason}")
    if all(outcome.error is not None for outcome in outcomes):
        progress.line("; ".join(["no run was completed", *budget_note(study, result, budget)]))
        raise StoppedError(EXIT_FAILED)


def budget_note(study: Study, result: StudyResult, budget: Budget) -> list[str]:
    """What the budget left out, and the command that continues the study; or nothing."""
    if not result.not_run:
        return []
    by = result.left_out_by or budget.text
    text = not_run_text(result.not_run, by, len(study.trials))
    return [f"{text}; continue with: {study.resume_command}"]


def study_status(outcomes: Sequence[Outcome], comparison: Comparison, fail_if: str) -> int:
    """The exit status after the comparison: 1 if a run failed to start or the machine ended it.

    Raises:
        ConditionMetError: `compare.fail_if` is met.
    """
    from mprun.cli.compare_command import check

    check(comparison, fail_if)  # raises: its status 3 outweighs a missing run
    missing = any(o.summary is None or o.by_machine for o in outcomes)
    return EXIT_FAILED if missing else EXIT_OK


def for_choice(request: StudyRequest, study: Study, outcomes: Sequence[Outcome]) -> CompareSettings:
    """The settings for a choice: compared with the study's baseline, never on test samples."""
    baseline, split = study.judged_by(outcomes)
    return replace(request.settings.compare, baseline=baseline, split=split)


def report_study(
    study: Study,
    comparison: Comparison,
    settings: CompareSettings,
    verbose: bool,
    answer: str = "",
) -> None:
    """Show a study's comparison, and give the report to the logger of its trials; see `report`."""
    from mprun.cli.compare_command import report
    from mprun.study.study import log_report

    # The study's command would run it again: `mprun show` reads its records
    again = f"by mprun show {shlex.quote(str(study.folder))}"
    files = report(comparison, settings, study.folder, verbose, answer, again)
    log_report(study, files, lambda text: print_line(stderr_console(), f"warning: {text}"))
