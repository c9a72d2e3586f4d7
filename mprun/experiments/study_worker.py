"""What each job of a launcher does: it helps with a study until no trial is open."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console

from mprun.compare.comparison import Run
from mprun.compare.load import others_in
from mprun.config.settings import Objective
from mprun.errors import MprunError, StoppedError
from mprun.experiments.advise import screened
from mprun.experiments.budget import Budget, BudgetSignals
from mprun.experiments.study import Study, resumed_study
from mprun.experiments.study_loop import Drop
from mprun.experiments.study_progress import StudyProgress
from mprun.experiments.trials import Outcome
from mprun.train.signals import SignalReceivedError

SIGUSR2 = getattr(signal, "SIGUSR2", None)  # Windows has none


@dataclass(frozen=True)
class Screening:
    """How `mprun advise` drops modes during a study; see `advise.screened`."""

    objective: Objective
    pairs: int

    def drop(self, study: Study) -> Drop:
        """The function that a study calls."""

        def dropped(outcomes: Sequence[Outcome]) -> Mapping[str, str]:
            beside = _beside(study, outcomes)
            return screened(outcomes, study.baseline, self.objective, self.pairs, beside)

        return dropped


def _beside(study: Study, outcomes: Sequence[Outcome]) -> list[Run]:
    """The runs of a study without an outcome; those of other processes last until now."""
    folder, now = study.folder, datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    known = [Run(folder / o.trial.name, o.summary) for o in outcomes if o.summary is not None]
    names = {trial.name for trial in study.trials}
    others = others_in(folder, known)
    for run in others:
        if run.summary.status == "running" and run.path.name in names:
            run.summary.written_at = now
    return others


@dataclass(frozen=True)
class StudyWork:
    """What a process needs to know to help with a study; it can be pickled."""

    command: str
    folder: Path
    trust: bool
    screening: Screening | None
    budget: str
    """The setting of the budget."""
    budget_min: float | None
    """Minutes that are left."""
    threads: int | None
    """PyTorch's threads; None leaves them as they are."""
    is_shown: bool
    """Whether progress is printed."""
    is_own_process: bool
    """Whether it has a process of its own, not that of the command."""


def help_with_study(work: StudyWork) -> list[str]:
    """Carry out trials until none is open; the errors of those that the machine ended or prevented.

    SIGTERM ends it with a checkpoint, and SIGUSR2 too, which submitit sends before a job's time is
    over.
    """
    if work.threads is not None:
        torch.set_num_threads(work.threads)
    stop = BudgetSignals(Budget(work.budget, work.budget_min))
    with contextlib.ExitStack() as stack:
        out = sys.stdout if work.is_shown else stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(stop)
        if SIGUSR2 is not None:
            before = signal.signal(SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            stack.callback(signal.signal, SIGUSR2, before)
        try:
            return _errors(work, stop, Console(file=out, width=120))
        except (SignalReceivedError, StoppedError):
            if not work.is_own_process:
                raise
            return []
        except MprunError as error:
            return [str(error)]


def _errors(work: StudyWork, stop: BudgetSignals, console: Console) -> list[str]:
    study = resumed_study(work.command, work.folder, work.trust)
    progress = StudyProgress(console, list(study.plan.variants), len(study.plan.seeds))
    drop = None if work.screening is None else work.screening.drop(study)
    outcomes = study.run(stop, progress, drop).outcomes
    return [str(o.error) for o in outcomes if o.by_machine or o.summary is None]
