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
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from mprun.config import Composed, compose
from mprun.config.reference import as_text, quoted
from mprun.errors import MachineFailedError, MprunError, StoppedError, UsageError
from mprun.records.console import Moment, ProgressDisplay, ProgressView, duration
from mprun.records.console.fitted_table import FittedTable, text_column
from mprun.records.console.formatting import substitution_label
from mprun.records.run_folder import file_names
from mprun.records.run_record import Summary, is_failed_by_machine, read_summary
from mprun.study.compare.load import SPLITS, score
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


# ---- the progress: a live table on a terminal, a line for each run anywhere else ----------------

FIGURES = re.compile(r"\d[\d.,]*")  # What differs between warnings that are alike


@dataclass
class _VariantProgress:
    """The results of a variant's runs so far."""

    step_ms: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    metric: str = ""
    planned: int = 0
    label: str = ""  # The label of its times: EMULATED, or the ops that were computed in float32
    verdict: str = ""  # What the last look of the study showed
    ended: int = 0
    failed: int = 0

    def add(self, summary: Summary | None, error: str | None) -> None:
        self.ended += 1
        self.failed += error is not None
        if summary is None or error is not None:
            return
        emulated = summary.execution == "emulated"
        self.label = "EMULATED" if emulated else substitution_label([summary])
        if (ms := summary.step_time_ms.median) is not None:
            self.step_ms.append(ms)
        self.metric, score = score_of(summary)
        if score is not None:
            self.scores.append(score)

    def cells(self) -> list[str]:
        runs = f"{self.ended}/{self.planned}" + (f", {self.failed} failed" if self.failed else "")
        ms = f"{median(self.step_ms):.2f} ms {self.label}".rstrip() if self.step_ms else "-"
        score = f"{self.metric} {fmean(self.scores):.4f}" if self.scores else "-"
        return [runs, ms, score, self.verdict]


def score_of(summary: Summary) -> tuple[str, float | None]:
    """A run's metric, of averaged weights if it has them: of the test, validation or training."""
    values = (score(summary, split, summary.averaged is not None) for split in SPLITS)
    return summary.metric.name, next((x for x in values if x is not None), None)


class StudyProgress(ProgressDisplay):
    """The progress of a study's runs.

    Each variant has as many runs as there are `seeds`, or at most so many if `is_limit`. With
    `verbose`, warnings and speeds are shown when a run begins, each once; else alike warnings are
    one line at the end, with their count.
    """

    def __init__(
        self,
        console: Console,
        variants: Sequence[str],
        seeds: int,
        processes: int = 1,
        verbose: bool = False,
        is_limit: bool = False,
    ) -> None:
        self._most = "up to " if is_limit else ""
        self._variants = {name: _VariantProgress(planned=seeds) for name in variants}
        self._run_s: list[float] = []
        self._ended: set[str] = set()
        self._processes = processes
        self._run, self._text, self._fraction = "", "", 0.0
        self._verbose, self._shown = verbose, set[str]()
        self._warnings: dict[str, list[str]] = {}
        self._failed: dict[str, str] = {}
        # Once a second: a redraw takes CPU time from the run that is measured
        live = Live(console=console, get_renderable=self._table, refresh_per_second=1)
        super().__init__(console, live)

    def begin(self, variant: str, seed: int) -> None:
        """A run starts."""
        self._run, self._text, self._fraction = f"{variant} seed {seed}", "", 0.0
        self._run_started_s = time.monotonic()

    def update(self, text: str, fraction: float) -> None:
        """The current run took steps; `fraction` of it is done."""
        self._text, self._fraction = text, fraction

    def end(self, variant: str, summary: Summary | None, error: str | None) -> None:
        """A run ended; only the first time counts."""
        if self._run in self._ended:
            return
        self._ended.add(self._run)
        elapsed_s = time.monotonic() - self._run_started_s  # short if an earlier process ran it
        self._run_s.append(max(elapsed_s, 0.0 if summary is None else summary.wall_time_s))
        self._fraction = 0.0  # the run counts as done now
        runs = self._variants[variant]
        runs.add(summary, error)
        if error is not None:
            # Often all runs of a mode fail alike: the reason is shown once
            first = self._failed.setdefault(FIGURES.sub("", error), self._run)
            why = f": {error}" if first == self._run else f", for the same reason as {first}"
            self.line(f"{self._run} failed{why}")
        elif self._live is None:  # no terminal: a line in place of the table
            _, ms, score, _ = runs.cells()
            self.line(f"{self._run}: so far {ms}, {score}; {self._remaining()}")

    def notices(self, mode: str, warnings: Iterable[str], speed: str) -> None:
        """What is to be known of the run that begins: its warnings, how its speed was chosen."""
        texts = [f"warning: {text}" for text in warnings]
        if not self._verbose:
            for text in texts:
                alike = FIGURES.sub("", text.replace(mode, ""))
                self._warnings.setdefault(alike, []).append(text)
            return
        texts += [f"{mode}, {speed}"] if speed else []
        for text in dict.fromkeys(x for x in texts if x not in self._shown):
            self._shown.add(text)
            self.line(text)

    def stop(self) -> None:
        """End the live display, and show the warnings of runs."""
        super().stop()
        for first, *others in self._warnings.values():
            self.line(first + (f" (in {len(others) + 1} runs)" if others else ""))
        self._warnings.clear()

    def wait_for(self, runs: Sequence[str]) -> None:
        """Other processes are at these runs."""
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        self._run, self._text, self._fraction = f"{runs[0]}{more}, in other processes", "", 0.0
        self.status(f"{self._remaining()}; waiting for {self._run}")

    def look(self, lines: Mapping[str, str]) -> None:
        """What a look of the study showed of each variant."""
        for name, text in lines.items():
            if self._live is None and self._variants[name].verdict != text:
                self.line(f"{name}: {text}")
            self._variants[name].verdict = text

    def drop(self, variants: Iterable[str]) -> None:
        """These variants have no further runs."""
        for name in variants:
            self._variants[name].planned = self._variants[name].ended  # else the time left is wrong

    def _remaining(self) -> str:
        """The number of runs that are done, and an estimate of the time left."""
        done = sum(runs.ended for runs in self._variants.values())
        total = sum(runs.planned for runs in self._variants.values())
        left = ""
        if self._run_s and done < total:
            run_s = fmean(self._run_s) / self._processes
            left = f", about {duration(run_s * (total - done - self._fraction))} left"
        return f"{done} of {self._most}{total} runs{left}"

    def _table(self) -> RenderableType:
        table = FittedTable(
            "",
            text_column("variant"),
            text_column("runs"),
            text_column("step time", 1),
            text_column("mean so far"),
            text_column("verdict"),
            elsewhere="the report at the end",
        )
        for name, runs in self._variants.items():
            table.add_row(name, *runs.cells())
        return Group(table, Text(f"{self._remaining()}; now {self._run}  {self._text}"))


# ---- carrying trials out -------------------------------------------------------------------------


@dataclass
class Trials:
    """Carries out trials in a study's folder; samples are loaded once."""

    folder: Path
    config_dir: Path | None
    stop: StopSignals
    view: StudyProgress
    load: DataCache
    untrusted: Path | None = None
    is_warm: bool = False  # Whether this process has trained

    def has_ended(self, trial: Trial) -> bool:
        """Whether an earlier process carried the trial out."""
        return settled_summary(self.folder / trial.name) is not None

    def run(self, trial: Trial) -> Outcome:
        """Carry out a trial, unless an earlier process did; what the machine ended is resumed.

        Raises:
            StoppedError: a signal or the budget ended it; its record stays.
        """
        self.view.begin(trial.variant, trial.seed)
        folder = self.folder / trial.name
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
                raise StoppedError(self.stop.exit_status)
            summary = _summary(folder)
        self.view.end(trial.variant, summary, error)
        return Outcome(trial, summary, error, by_machine)

    def _carry_out(self, trial: Trial, folder: Path) -> Summary:
        saved = checkpoint.load(folder)
        if saved is not None:
            trust = f"run.trust={str(self.untrusted is None).lower()}"
            composed = compose([f"run.resume={quoted(folder)}", trust], self.config_dir)
        else:
            put_aside(folder)  # a run that was killed before its first checkpoint
            own = [f"seed={trial.seed}", f"run.dir={quoted(as_text(str(folder)))}"]
            composed = compose([*trial.overrides, *own], self.config_dir)
        choices = saved["choices"] if saved else None
        # The first steps of a process compile and fill caches, and the data is loaded: without this
        # the first trial would look slower
        if not self.is_warm:
            with suppress(Exception):  # the run below fails in the same way and reports it
                plan = self._plan(composed, choices)
                with plan.backend_flags():
                    Trainer(build_parts(plan), Limits(None, WARM_UP_STEPS, None)).fit()
            self.is_warm = True
        watch = Stopwatch()
        plan = self._plan(composed, choices)
        plan = plan if choices else with_fastest(plan)  # a resumed run keeps its earlier choice
        speed = (plan.speed_reason or "").removesuffix(SAVED)
        self.view.notices(plan.policy.name, plan.warnings, speed)
        view = _TrialView(self.view, plan.limits.epochs, plan.planned_steps)
        progress = Progress(view, plan.planned_steps, plan.limits.max_time_s)
        return run(plan, composed.resolved, self.stop, [progress], saved, watch).summary

    def _plan(self, composed: Composed, choices: Mapping[str, Any] | None) -> Plan:
        config, given = composed.config, composed.given
        return make_plan(config, given, choices, self.load, self.untrusted)


def put_aside(folder: Path) -> None:
    """Rename `folder`, if a killed run has made it, so that the trial can start again."""
    if not folder.exists():
        return
    n = 1
    while (aside := folder.with_name(f"{folder.name}.abandoned-{n}")).exists():
        n += 1
    folder.rename(aside)


def settled_summary(folder: Path) -> Summary | None:
    """The record of a run with a result, be it a failure of its own; None for any other."""
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

    def update(self, moment: Moment) -> None:
        self.view.update(moment.text(self.epochs, self.steps), moment.fraction)


# ---- locks ---------------------------------------------------------------------------------------

FOLDER = ".claims"  # Hidden, so that `compare` does not search it for runs


class TrialClaims:
    """The locks of a study, in its folder.

    Raises:
        UsageError: the folder cannot be written, or its file system has no locks.
    """

    def __init__(self, study: Path) -> None:
        self._folder = study / FOLDER
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"{study} cannot be written ({error.strerror})") from None

    @contextmanager
    def held(self, name: str) -> Iterator[bool]:
        """Inside, this process holds the lock of this name; False if another process does."""
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
