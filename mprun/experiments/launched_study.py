"""A study that a launcher's processes carry out, followed by the process that started them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator

from mprun.compare.formatting import counted
from mprun.config.settings import Executor, Launcher, LauncherSettings
from mprun.errors import UsageError
from mprun.experiments.budget import Budget, BudgetSignals
from mprun.experiments.launchers import (
    Workers,
    check_start,
    is_on_this_machine,
    is_side_by_side,
    start_workers,
    threads_each,
)
from mprun.experiments.study import Study
from mprun.experiments.study_loop import StudyResult
from mprun.experiments.study_progress import StudyProgress
from mprun.experiments.study_worker import Screening, StudyWork
from mprun.experiments.trials import Outcome, Trial
from mprun.parallel.launch import launch_of
from mprun.train.signals import SignalReceivedError

FOLLOW_S = 1.0
"""Seconds between two looks at the records."""
JOBS_ENDED = "jobs that ended early"


def check_launcher(settings: LauncherSettings, needs_times: str = "") -> None:
    """Refuse a launcher that cannot do what is asked.

    Args:
        settings: the launcher's.
        needs_times: the override that makes the command decide by times; empty if it does not.

    Raises:
        UsageError: a field without effect, a missing package, or trials side by side on this
            machine although their times decide.
    """
    started = launch_of().world_size
    if settings.name is not Launcher.local and started > 1:
        raise UsageError(
            f"launcher={settings.name.name}: torchrun started {started} processes, which train "
            "together; legal: launcher=local under torchrun, or the launcher without torchrun"
        )
    settings.check()
    check_start(settings)
    if needs_times and is_side_by_side(settings):
        raise UsageError(
            f"launcher={settings.name.name}: {needs_times} compares times, and {settings.count} "
            "processes on one machine slow each other; legal: launcher=local, launcher=submitit "
            "with a machine for each job, or advise.objective=memory"
        )


def run_launched(
    study: Study,
    settings: LauncherSettings,
    stop: BudgetSignals,
    progress: StudyProgress,
    screening: Screening | None,
) -> StudyResult:
    """Carry out a study with the processes of a launcher.

    Trials that they leave open, because they were killed, are carried out by this process, if they
    were on this machine.

    Raises:
        UsageError: as `start_workers` and `Study.run`.
        SignalReceivedError: a signal ended it; all trials have checkpoints.
    """
    drop = None if screening is None else screening.drop(study)
    if settings.name is Launcher.local:
        return study.run(stop, progress, drop)
    work = _work(study, settings, stop.budget, screening)
    workers = start_workers(settings, work)
    threads = "" if work.threads is None else f", {counted(work.threads, 'thread')} each"
    progress.line(f"launcher={settings.name.name}: {settings.count} processes{threads}")
    ended: dict[Trial, Outcome] = {}
    with _stopping(workers):
        while workers.running():
            ended |= study.newly_ended(ended, progress)
            time.sleep(FOLLOW_S)
    for error in dict.fromkeys(workers.errors()):
        progress.line(f"warning: {error}")
    workers.close()
    if is_on_this_machine(settings):
        return study.run(stop, progress, drop)
    ended |= study.newly_ended(ended, progress)
    outcomes = list(ended.values())
    not_run = _not_run(study, ended, {} if drop is None else drop(outcomes))
    return StudyResult(outcomes, not_run, stop.budget.text or JOBS_ENDED)


def _work(
    study: Study, settings: LauncherSettings, budget: Budget, screening: Screening | None
) -> StudyWork:
    is_own_process = settings.executor is not Executor.debug
    return StudyWork(
        command=study.plan.command,
        folder=study.folder.resolve(),
        trust=study.trusted,
        screening=screening,
        budget=budget.setting,
        budget_min=budget.minutes_left,
        threads=threads_each(settings),
        is_shown=settings.name is Launcher.submitit and is_own_process,  # in the job's log
        is_detached=is_on_this_machine(settings) and is_own_process,
        is_own_process=is_own_process,
    )


def _not_run(
    study: Study, ended: Collection[Trial], dropped: Collection[str]
) -> dict[str, list[int]]:
    """Variant to the seeds of trials that have not ended."""
    missing: dict[str, list[int]] = {}
    for trial in study.trials:
        if trial not in ended and trial.variant not in dropped:
            missing.setdefault(trial.variant, []).append(trial.seed)
    return missing


@contextlib.contextmanager
def _stopping(workers: Workers) -> Iterator[None]:
    """At a signal, stop the processes and wait until their trials have checkpoints."""
    try:
        yield
    except SignalReceivedError:
        workers.stop()
        while workers.running():  # a second signal ends the waiting
            time.sleep(0.1)
        workers.close()
        raise
