"""Shared by the commands that run studies: their arguments, the runs, the comparison settings."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mprun.cli.arguments import parse_arguments
from mprun.console import print_line, stdout_console
from mprun.errors import EXIT_FAILED, StoppedError

if TYPE_CHECKING:
    from mprun.config.settings import CompareSettings
    from mprun.config.study_request import StudyRequest
    from mprun.experiments.study import Drop, Study
    from mprun.experiments.trials import Outcome


def request_of(
    command: str, args: Sequence[str], *sections: str, refused: Sequence[str] = ()
) -> StudyRequest:
    """The arguments of a study; see `study_request`."""
    from mprun.config.study_request import study_request

    known = parse_arguments(command, args)
    return study_request(command, known.overrides, known.config_dir, *sections, refused=refused)


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


def run_study(study: Study, drop: Drop | None = None) -> tuple[list[Outcome], int | None]:
    """Run a study's trials; their outcomes, and the exit status if nothing can be compared."""
    from mprun.experiments.study_progress import StudyProgress
    from mprun.train.signals import SignalReceivedError, StopSignals

    plan = study.plan
    progress = StudyProgress(stdout_console(), list(plan.variants), len(plan.seeds))
    progress.line(f"{plan.command}: {len(study.trials)} runs in {study.folder}")
    with StopSignals() as stop:
        progress.start()
        try:
            outcomes = study.run(stop, progress, drop)
        except (StoppedError, SignalReceivedError):
            override = shlex.quote(f"run.resume={study.folder}")
            progress.line(f"stopped by {stop.name}; resume with: mprun {plan.command} {override}")
            return [], stop.exit_status
        finally:
            progress.stop()
    without_run = [o for o in outcomes if o.summary is None]
    if without_run:
        progress.line(
            f"{len(without_run)} of {len(outcomes)} runs failed to start: {without_run[0].error}"
        )
    if all(outcome.error is not None for outcome in outcomes):
        progress.line("no run was completed")
        return outcomes, EXIT_FAILED
    return outcomes, None


def for_choice(request: StudyRequest, study: Study, outcomes: Sequence[Outcome]) -> CompareSettings:
    """The settings for a choice: compared with the study's baseline, never on test samples."""
    baseline, split = study.judged_by(outcomes)
    return replace(request.settings.compare, baseline=baseline, split=split)


def print_out(text: str) -> None:
    """Print a line on standard output."""
    print_line(stdout_console(), text)
