"""Shared by the commands that run studies: their arguments, the runs, the comparison settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import parse_arguments
from mprun.console import print_line, stderr_console, stdout_console
from mprun.errors import EXIT_FAILED, EXIT_OK, StoppedError
from mprun.experiments.budget import Budget, BudgetSignals, not_run_text

if TYPE_CHECKING:
    from mprun.config.settings import CompareSettings
    from mprun.config.study_request import StudyRequest
    from mprun.experiments.hydra_launch import Screening, StudyLauncher
    from mprun.experiments.study import Study, StudyResult
    from mprun.experiments.trials import Outcome


def request_of(
    command: str, args: Sequence[str], *sections: str, refused: Sequence[str] = ()
) -> StudyRequest:
    """The arguments of a study; see `study_request`."""
    from mprun.config.study_request import study_request

    known = parse_arguments(command, args)
    return study_request(command, known.overrides, known.config_dir, *sections, refused=refused)


def launcher_of(request: StudyRequest) -> StudyLauncher:
    """Which of Hydra's launchers runs the study."""
    from mprun.experiments.hydra_launch import StudyLauncher

    return StudyLauncher(request.settings.launcher, request.hydra)


def study_of(
    request: StudyRequest,
    new: Callable[[StudyRequest], Study],
    report: Callable[[str, str], None] = lambda name, reason: None,
) -> Study:
    """The study to resume, or a new one.

    Args:
        request: the arguments.
        new: makes a new study.
        report: called with name and reason for each variant that a new study leaves out.
    """
    from mprun.experiments.study import resumed_study

    if request.resume is not None:
        return resumed_study(request.command, request.resume, request.trust)
    study = new(request)
    for name, reason in study.plan.not_tried.items():
        report(name, reason)
    return study


def run_study(
    study: Study,
    launcher: StudyLauncher,
    budget: Budget | None = None,
    screening: Screening | None = None,
) -> tuple[StudyResult, int | None]:
    """Run a study's trials; what was run, and the exit status if nothing can be compared.

    Args:
        study: the study.
        launcher: which processes run it, see `check_launcher`.
        budget: its time; None for no limit.
        screening: how variants are dropped; None if none is.
    """
    from mprun.experiments.hydra_launch import run_launched
    from mprun.experiments.study import StudyResult
    from mprun.experiments.study_progress import StudyProgress
    from mprun.train.signals import SignalReceivedError

    plan = study.plan
    count = launcher.count
    progress = StudyProgress(stdout_console(), list(plan.variants), len(plan.seeds), count)
    progress.line(f"{plan.command}: {len(study.trials)} runs in {study.folder}")
    stop = BudgetSignals(budget or Budget())
    with stop:
        progress.start()
        try:
            result = run_launched(study, launcher, stop, progress, screening)
        except (StoppedError, SignalReceivedError):
            progress.line(f"stopped by {stop.name}; resume with: {study.resume_command}")
            return StudyResult([], {}), stop.exit_status
        finally:
            progress.stop()
    outcomes = result.outcomes
    ended = [o for o in outcomes if o.by_machine]
    if ended:
        progress.line(
            f"{len(ended)} of {len(outcomes)} runs were ended by the machine and are no result: "
            f"{ended[0].error}; try them again with: {study.resume_command}"
        )
    without_run = [o for o in outcomes if o.summary is None and not o.by_machine]
    if without_run:
        progress.line(
            f"{len(without_run)} of {len(outcomes)} runs failed to start: {without_run[0].error}"
        )
    if all(outcome.error is not None for outcome in outcomes):
        progress.line("; ".join(["no run was completed", *budget_note(study, result, stop.budget)]))
        return result, EXIT_FAILED
    return result, None


def budget_note(study: Study, result: StudyResult, budget: Budget) -> list[str]:
    """What the budget left out, and the command that continues the study; or nothing."""
    if not result.not_run:
        return []
    by = result.left_out_by or budget.text
    text = not_run_text(result.not_run, by, len(study.trials))
    return [f"{text}; continue with: {study.resume_command}"]


def study_status(outcomes: Sequence[Outcome]) -> int:
    """The exit status after the comparison: 1 if a run failed to start or the machine ended it."""
    missing = any(o.summary is None or o.by_machine for o in outcomes)
    return EXIT_FAILED if missing else EXIT_OK


def for_choice(request: StudyRequest, study: Study, outcomes: Sequence[Outcome]) -> CompareSettings:
    """The settings for a choice: compared with the study's baseline, never on test samples."""
    baseline, split = study.judged_by(outcomes)
    return replace(request.settings.compare, baseline=baseline, split=split)


def log_report(study: Study, files: Sequence[Path]) -> None:
    """Give the files of a report to the logger of the study's trials."""
    from mprun.experiments.study import log_report

    log_report(study, files, lambda text: print_line(stderr_console(), f"warning: {text}"))


def print_out(text: str) -> None:
    """Print a line on standard output."""
    print_line(stdout_console(), text)
