"""A study in several processes, which one of Hydra's launchers starts as jobs.

    mprun sweep recipe=mnist seeds=5 hydra/launcher=joblib hydra.launcher.n_jobs=4
    mprun sweep recipe=mnist hydra/launcher=submitit_slurm hydra.launcher.partition=gpu

`launcher=joblib|submitit` is short for the name. Each job helps with the study until no
trial is open, so it does not matter which job takes which trial, or how many jobs start. Signals,
logs and limits are the launcher's: a job that it ends leaves its last checkpoint, and the study is
resumed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mprun.config.multirun import check_hydra_launcher, launch
from mprun.config.settings import PROCESSES, LauncherSettings
from mprun.errors import MprunError, StoppedError, UsageError, first_line
from mprun.records.console.formatting import counted
from mprun.records.files import launch_of
from mprun.study.advise import screened
from mprun.study.budget import Budget, BudgetSignals
from mprun.study.compare.comparison import Run
from mprun.study.compare.load import others_in
from mprun.study.study import LOGS, Study, StudyResult
from mprun.study.trials import Outcome, StudyProgress, settled_summary
from mprun.train.assemble import DataCache
from mprun.train.machine.machine import usable_cores
from mprun.train.signals import SignalReceivedError

SIGUSR2 = getattr(signal, "SIGUSR2", None)  # Windows has none


@dataclass(frozen=True)
class Screening:
    """How `mprun advise` drops modes during a study; see `advise.screened`."""

    objective: str
    pairs: int

    def drop(self, study: Study, outcomes: Sequence[Outcome]) -> Mapping[str, str]:
        """The modes of a study that cannot win, to the reason."""
        beside = _other_runs(study, outcomes)
        return screened(outcomes, study.baseline, self.objective, self.pairs, beside)


def _other_runs(study: Study, outcomes: Sequence[Outcome]) -> list[Run]:
    """The runs of a study without an outcome; those of other processes last until now."""
    folder, now = study.folder, datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    known = [Run(folder / o.trial.name, o.summary) for o in outcomes if o.summary is not None]
    names = {trial.name for trial in study.trials}
    others = others_in(folder, known)
    for run in others:
        # Its record is as old as its last write, but it shares the machine until now. A run that
        # was put aside is not a trial any more.
        if run.summary.status == "running" and run.path.name in names:
            run.summary.written_at = now
    return others


@dataclass(frozen=True)
class StudyJob:
    """What a job of a launcher does, in this process or another one: it can be pickled."""

    study: Study
    launcher: str  # Its name
    screening: Screening | None
    budget: str  # The setting of the budget
    budget_min: float | None  # Minutes that are left
    threads: int | None  # PyTorch's threads; None leaves them as they are

    def __call__(self) -> list[str]:
        """Carry out trials until none is open; the errors of those that have no result.

        SIGTERM ends it with a checkpoint, and SIGUSR2 too, which submitit sends before a job's time
        is over.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        stop = BudgetSignals(Budget(self.budget, self.budget_min))
        with contextlib.ExitStack() as stack:
            # submitit writes the output of a job into a log; that of joblib's would mix with ours
            has_log = self.launcher.startswith("submitit")
            out = sys.stdout if has_log else stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(stop)
            if SIGUSR2 is not None:
                # A SIGTERM in its place: one way to stop, whose handler `stop` has installed
                before = signal.signal(SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
                stack.callback(signal.signal, SIGUSR2, before)
            try:
                return self._errors(stop, Console(file=out, width=120))
            except (SignalReceivedError, StoppedError):
                if self.launcher == "basic":  # the process is that of the command
                    raise
                return []
            except MprunError as error:
                return [str(error)]

    def _errors(self, stop: BudgetSignals, console: Console) -> list[str]:
        plan = self.study.plan
        progress = StudyProgress(console, list(plan.variants), len(plan.seeds), verbose=True)
        drop = None if self.screening is None else partial(self.screening.drop, self.study)
        outcomes = self.study.run(stop, progress, drop).outcomes
        return [str(o.error) for o in outcomes if o.by_machine or o.summary is None]


FOLLOW_S = 1.0  # Seconds between two looks at the records of the jobs
JOBS_ENDED = "jobs that ended early"
# `timeout_min` of submitit's jobs on this machine, a week: its default of an hour would end them
MAX_MIN = 7 * 24 * 60
ELSEWHERE = ("slurm", "aws")  # Parts of the names of launchers whose jobs are on other machines


@dataclass(frozen=True)
class StudyLauncher:
    """Which of Hydra's launchers runs a study, and how."""

    settings: LauncherSettings
    hydra: tuple[str, ...] = ()
    """The user's overrides of Hydra: `hydra/launcher=NAME`, `hydra.launcher.KEY=VALUE`."""

    @property
    def name(self) -> str:
        """The launcher's name in Hydra; empty: no further process is started."""
        given = [x.partition("=")[2] for x in self.hydra if x.startswith("hydra/launcher=")]
        if given:
            return given[-1]
        if self.settings.name == "local":
            return ""
        if self.settings.name == "joblib":
            return "joblib"
        return "submitit_local" if shutil.which("srun") is None else "submitit_slurm"

    @property
    def count(self) -> int:
        """How many jobs are started; 1 without a launcher."""
        own = [x.partition("=")[2] for x in self.hydra if x.startswith("hydra.launcher.n_jobs=")]
        parallel = int(own[-1]) if own and own[-1].isdecimal() else 0
        if self.name in ("", "basic"):
            return 1
        return self.settings.processes or parallel or PROCESSES

    @property
    def overrides(self) -> list[str]:
        """The overrides that Hydra gets."""
        defaults: dict[str, Any] = {}
        if self.name == "joblib":
            defaults["n_jobs"] = self.count
        elif self.name == "submitit_local":
            defaults = {"timeout_min": MAX_MIN, "gpus_per_node": torch.accelerator.device_count()}
        elif self.name == "submitit_slurm":
            defaults["name"] = "mprun"
        own = [f"hydra.launcher.{key}={value}" for key, value in defaults.items()]
        given = [text for text in self.hydra if not text.startswith("hydra/launcher=")]
        return [f"hydra/launcher={self.name}", *own, *given]

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the jobs run here."""
        return not any(part in self.name for part in ELSEWHERE)

    @property
    def is_side_by_side(self) -> bool:
        """Whether trials run on this machine at the same time, so that their times mean nothing."""
        return self.is_on_this_machine and self.count > 1

    @property
    def threads_each(self) -> int | None:
        """PyTorch's threads in each job; None where the environment or the launcher decides."""
        if not self.is_side_by_side or "OMP_NUM_THREADS" in os.environ:
            return None
        # More threads than cores slow every job: OpenMP threads wait actively
        return max(1, min(torch.get_num_threads(), usable_cores() // self.count))


def check_launcher(launcher: StudyLauncher, needs_times: str = "") -> None:
    """Refuse a launcher that cannot do what is asked.

    `needs_times` is the override that makes the command decide by times; empty if it does not.

    Raises:
        UsageError: a field without effect, a plugin that is not installed, or trials side by
            side on this machine although their times decide.
    """
    settings = launcher.settings
    named = [text for text in launcher.hydra if text.startswith("hydra/launcher=")]
    if not named:
        settings.check()
    elif settings.name != "local":
        raise UsageError(
            f"{named[0]} and launcher={settings.name} name a launcher twice; leave out one"
        )
    if not launcher.name:
        return
    if (started := launch_of().world_size) > 1:
        raise UsageError(
            f"launcher={launcher.name}: torchrun started {started} processes, which train "
            "together; legal: launcher=local under torchrun, or the launcher without torchrun"
        )
    check_hydra_launcher(launcher.name, launcher.overrides)
    if launcher.name == "submitit_slurm" and shutil.which("srun") is None:
        raise UsageError(
            "launcher=submitit_slurm: there is no srun, so this is not a Slurm cluster"
        )
    if needs_times and launcher.is_side_by_side:
        raise UsageError(
            f"launcher={launcher.name}: {needs_times} compares times, and {launcher.count} "
            "processes on one machine slow each other; legal: launcher=local, launcher=submitit "
            "with a machine for each job, or advise.objective=memory"
        )


def run_launched(
    study: Study,
    launcher: StudyLauncher,
    stop: BudgetSignals,
    progress: StudyProgress,
    screening: Screening | None,
) -> StudyResult:
    """Carry out a study with the jobs of a launcher.

    Trials that they leave open are carried out by this process, if they were on this machine.

    Raises:
        UsageError: as `check_launcher` and `Study.run`.
        SignalReceivedError: a signal ended it.
    """
    drop = None if screening is None else partial(screening.drop, study)
    if not launcher.name:
        return study.run(stop, progress, drop)
    # A job has another working folder, and is pickled: without the samples loaded here
    there = replace(study, folder=study.folder.resolve(), load=DataCache())
    budget, each = stop.budget, launcher.threads_each
    job = StudyJob(there, launcher.name, screening, budget.setting, budget.minutes_left, each)
    threads = "" if each is None else f", {counted(each, 'thread')} each"
    progress.line(f"launcher={launcher.name}: {counted(launcher.count, 'job')}{threads}")
    with _following(study, progress):
        errors = _launch(launcher, job)
    for error in dict.fromkeys(errors):
        progress.line(f"warning: {error}")
    if launcher.is_on_this_machine:  # a job that was killed may have left trials open
        return study.run(stop, progress, drop)
    ran = study.run(BudgetSignals(Budget(minutes=0)), progress)  # reads records, begins nothing
    dropped = {} if drop is None else drop(ran.outcomes)
    not_run = {name: seeds for name, seeds in ran.not_run.items() if name not in dropped}
    return StudyResult(ran.outcomes, not_run, stop.budget.text or JOBS_ENDED)


def _launch(launcher: StudyLauncher, job: StudyJob) -> list[str]:
    """Start the jobs and wait for them; what went wrong in them."""
    # A new folder with a name that nobody can guess: submitit unpickles the results in it, and
    # unpickling runs code
    logs = job.study.folder / LOGS / secrets.token_hex(8)
    try:
        ended = launch(launcher.name, launcher.overrides, logs, job, launcher.count)
    except (SignalReceivedError, StoppedError, UsageError):
        raise
    except Exception as error:
        return [f"a job ended: {_line(error)}"]
    errors: list[str] = []
    for value in ended:
        if isinstance(value, SignalReceivedError | StoppedError):  # of a job in this process
            raise value
        errors += [_line(value)] if isinstance(value, BaseException) else value
    return errors


def _line(error: BaseException) -> str:
    """An error of a package as one line, without a full stop."""
    return f"{type(error).__name__}: {first_line(error)}".rstrip(".")


@contextlib.contextmanager
def _following(study: Study, progress: StudyProgress) -> Iterator[None]:
    """Inside, trials that jobs have ended are shown."""
    is_over = threading.Event()

    def follow() -> None:
        waiting = study.trials
        while not is_over.wait(FOLLOW_S):
            for trial in list(waiting):
                summary = settled_summary(study.folder / trial.name)
                if summary is not None:  # in whichever process
                    waiting.remove(trial)
                    progress.begin(trial.variant, trial.seed)
                    progress.end(trial.variant, summary, summary.error)

    thread = threading.Thread(target=follow, daemon=True)  # `launch` blocks until the jobs end
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
