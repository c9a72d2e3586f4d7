"""Trials: the runs of a study, as one process carries them out, one after the other.

A study is interruptible and resumable. Completed trials stay, and so do those that failed by
themselves. A trial that was interrupted, or ended by the machine (a full disk, too little memory, a
kill), resumes from its checkpoint.

Any number of processes may work on one study. A process that runs a trial holds a lock in the
study's folder `.claims/`. On several machines the folder has to be on a file system with locks for
all of them (NFS has them; Lustre with the mount option `flock`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mprun.config import Composed, compose
from mprun.config.reference import as_text, quoted
from mprun.errors import MachineFailedError, MprunError, StoppedError, UsageError
from mprun.records.console import Moment, ProgressView
from mprun.records.run_record import Summary, is_failed_by_machine, read_summary
from mprun.study.study_progress import StudyProgress
from mprun.train import checkpoint
from mprun.train.assemble import DataCache, Plan, build_parts, make_plan
from mprun.train.assemble.speed_trial import SAVED, with_fastest
from mprun.train.callbacks import Progress
from mprun.train.loop import Limits, Trainer
from mprun.train.machine.machine import host
from mprun.train.parallel.ranks import PeerLostError
from mprun.train.run import run
from mprun.train.signals import StopSignals
from mprun.train.stopwatch import Stopwatch

WARM_UP_STEPS = 5  # Steps without a record: the first steps of a process run with cold caches
ENDED = ("completed", "failed")  # The statuses of runs that are not run again
# Characters of a variant's name in a folder's name: file systems allow 255 bytes, and a seed and
# the suffixes of temporary files follow
LONGEST = 100


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    variant: str  # The variant's name in the study
    seed: int
    overrides: tuple[str, ...]  # Without the seed and the folder
    slug: str = ""  # The variant's name as part of a file name; empty: the name itself

    @property
    def name(self) -> str:
        """The run's folder in the study's."""
        return f"{self.slug or self.variant}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """The result of a trial."""

    trial: Trial
    summary: Summary | None  # The run's record; None if it failed to start
    error: str | None  # Why it failed, or None
    by_machine: bool = False
    """Whether the machine ended it: the failure is no result, and the study can try it again."""


def interleaved(variants: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[Trial]:
    """Trials seed by seed over all variants; each seed starts one variant later than the last."""
    names, slugs = list(variants), file_names(variants)
    trials: list[Trial] = []
    for i, seed in enumerate(seeds):
        # A machine drifts: it warms up, or other programs use it. With another variant at the start
        # of each seed (a Latin square) a slow drift affects all variants equally.
        first = i % len(names)
        order = names[first:] + names[:first]
        trials += [Trial(name, seed, tuple(variants[name]), slugs[name]) for name in order]
    return trials


def file_names(variants: Iterable[str]) -> dict[str, str]:
    """A unique name for each variant that every file system accepts."""
    slugs: dict[str, str] = {}
    for variant in variants:
        safe = "".join(c if c.isalnum() or c in "._+=-" else "_" for c in variant)[:LONGEST]
        name, n = safe, 1  # two names may differ only in replaced characters, or behind the end
        while name in slugs.values():
            n += 1
            name = f"{safe}~{n}"
        slugs[variant] = name
    return slugs


class Trials:
    """Carries out trials; samples are loaded once.

    Args:
        folder: the study's folder, for the runs' folders.
        config_dir: a further folder of configs, or None.
        stop: the signals, entered.
        view: shows the progress of each trial.
        load: loads the samples once.
        untrusted: a folder whose code is not run, or None.
    """

    def __init__(
        self,
        folder: Path,
        config_dir: Path | None,
        stop: StopSignals,
        view: StudyProgress,
        load: DataCache,
        untrusted: Path | None = None,
    ) -> None:
        self._folder, self._config_dir = folder, config_dir
        self._stop, self._view, self._load = stop, view, load
        self._untrusted = untrusted
        self._warm = False

    def has_ended(self, trial: Trial) -> bool:
        """Whether an earlier process carried the trial out."""
        return settled_summary(self._folder / trial.name) is not None

    def run(self, trial: Trial) -> Outcome:
        """Carry out a trial, unless an earlier process did; what the machine ended is resumed.

        Raises:
            StoppedError: a signal or the budget ended it; its record stays.
        """
        self._view.begin(trial.variant, trial.seed)
        folder = self._folder / trial.name
        summary, by_machine = settled_summary(folder), False
        if summary is not None:
            error = summary.error
        else:
            try:
                error, status = None, self._carry_out(trial, folder).status
            except PeerLostError:  # no other trial can run without the process
                raise
            except MprunError as failure:
                error, status = str(failure), "failed"
                by_machine = isinstance(failure, MachineFailedError)
            if status == "interrupted":
                raise StoppedError(self._stop.exit_status)
            summary = _summary(folder)
        self._view.end(trial.variant, summary, error)
        return Outcome(trial, summary, error, by_machine)

    def _carry_out(self, trial: Trial, folder: Path) -> Summary:
        saved = checkpoint.load(folder)
        if saved is not None:
            trust = f"run.trust={str(self._untrusted is None).lower()}"
            composed = compose([f"run.resume={quoted(folder)}", trust], self._config_dir)
        else:
            put_aside(folder)  # a run that was killed before its first checkpoint
            own = [f"seed={trial.seed}", f"run.dir={quoted(as_text(str(folder)))}"]
            composed = compose([*trial.overrides, *own], self._config_dir)
        choices = saved["choices"] if saved else None
        # The first steps of a process compile and fill caches, and the data is loaded: without this
        # the first trial would look slower
        if not self._warm:
            with suppress(Exception):  # the run below fails in the same way and reports it
                run_steps(self._plan(composed, choices), WARM_UP_STEPS)
            self._warm = True
        watch = Stopwatch()
        plan = self._plan(composed, choices)
        plan = plan if choices else with_fastest(plan)  # a resumed run keeps its earlier choice
        speed = (plan.speed_reason or "").removesuffix(SAVED)
        self._view.notices(plan.policy.name, plan.warnings, speed)
        view = _TrialView(self._view, plan.limits.epochs, plan.planned_steps)
        progress = Progress(view, plan.planned_steps, plan.limits.max_time_s)
        return run(plan, composed.resolved, self._stop, [progress], saved, watch).summary

    def _plan(self, composed: Composed, choices: Mapping[str, Any] | None) -> Plan:
        config, given = composed.config, composed.given
        return make_plan(config, given, choices, self._load, self._untrusted)


def run_steps(plan: Plan, steps: int) -> None:
    """Train for some steps without a record."""
    with plan.backend_flags():
        Trainer(build_parts(plan), Limits(None, steps, None)).fit()


def put_aside(folder: Path) -> None:
    """Rename `folder`, if a killed run has made it, so that the trial can start again."""
    if not folder.exists():
        return
    n = 1
    while (aside := folder.with_name(f"{folder.name}.abandoned-{n}")).exists():
        n += 1
    folder.rename(aside)


def settled_summary(folder: Path) -> Summary | None:
    """The record of a run that has a result, be it a failure of its own; None for any other."""
    summary = _summary(folder)
    if summary is None or summary.status not in ENDED or is_failed_by_machine(summary):
        return None
    return summary


def _summary(folder: Path) -> Summary | None:
    try:
        return read_summary(folder)
    except MprunError:
        return None


@dataclass(frozen=True)
class _TrialView(ProgressView):
    """Passes a run's progress to the study's view."""

    view: StudyProgress
    epochs: int | None
    steps: int | None

    def start(self) -> None:
        pass

    def update(self, moment: Moment) -> None:
        self.view.update(moment.text(self.epochs, self.steps), moment.fraction)

    def line(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass


FOLDER = ".claims"  # Hidden, so that `compare` does not search it for runs


class TrialClaims:
    """The locks of a study.

    Args:
        study: its folder.

    Raises:
        UsageError: the folder cannot be written.
    """

    def __init__(self, study: Path) -> None:
        self._folder = study / FOLDER
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"{study} cannot be written ({error.strerror})") from None

    @contextmanager
    def held(self, name: str) -> Iterator[bool]:
        """Inside, this process holds the lock of this name; False if another process does.

        Raises:
            UsageError: the folder cannot be written, or its file system has no locks.
        """
        # The system releases it when the process ends, however it ends: the trial is open again
        lock = FileLock(self._folder / f"{name}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        except OSError as error:
            raise UsageError(f"{self._folder} cannot be written ({error.strerror})") from None
        except NotImplementedError:  # filelock's error where the file system has no flock
            raise UsageError(
                f"{self._folder}: this file system has no locks; put the study on one that has them"
            ) from None
        try:
            yield True
        finally:
            lock.release()

    def record_start(self, name: str) -> None:
        """Add a line to `NAME.jsonl`: this process, which holds the lock, runs the trial now."""
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, "host": host(), "pid": os.getpid()})
        try:
            with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise UsageError(f"{self._folder} cannot be written ({error.strerror})") from None
