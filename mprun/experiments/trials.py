"""Runs that belong together, carried out one after the other in this process.

Times of runs are compared in pairs of equal seed. A machine drifts: it warms up, others use it. So
the order goes seed by seed over all variants, and each seed begins with another variant: whatever
drifts slowly meets all of them alike (a Latin square over seeds and places in the order).

A study can be stopped and gone on with: what is completed is kept, what was stopped goes on from
its checkpoint, and what left none begins anew, its remains put aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mprun.assemble import DataCache, Plan, build_parts, plan
from mprun.config import compose
from mprun.config.compose import quoted
from mprun.console import Moment, ProgressView
from mprun.errors import EXIT_OK, MprunError
from mprun.experiments.study_progress import StudyProgress
from mprun.precision import backend_flags
from mprun.records.run_record import Summary, read_summary
from mprun.run import run
from mprun.train import checkpoint
from mprun.train.callbacks import NoObserver
from mprun.train.loop import Limits, Trainer
from mprun.train.signals import StopSignals

WARM_UP_STEPS = 5
LONGEST = 100
"""Characters of a variant's name in a folder's."""


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    variant: str
    """The variant's name in the study."""
    seed: int
    words: tuple[str, ...]
    """Overrides, without the seed and the folder."""
    slug: str = ""
    """The variant's name as part of a file's; empty where the name itself will do."""

    @property
    def name(self) -> str:
        """The run's folder in the study's."""
        return f"{self.slug or self.variant}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What became of a trial."""

    trial: Trial
    summary: Summary | None
    """The run's record; None where it could not begin."""
    error: str | None
    """Why it failed, or None."""


class StudyStoppedError(BaseException):
    """A signal ended a trial, and with it the study; `status` is the exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def interleaved(variants: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[Trial]:
    """Seed by seed over all variants, each seed beginning one variant later than the last."""
    names, slugs = list(variants), file_names(variants)
    trials: list[Trial] = []
    for i, seed in enumerate(seeds):
        first = i % len(names)
        order = names[first:] + names[:first]
        trials += [Trial(name, seed, tuple(variants[name]), slugs[name]) for name in order]
    return trials


def file_names(variants: Iterable[str]) -> dict[str, str]:
    """A name for each variant that any file system takes, and no two share."""
    found: dict[str, str] = {}
    for variant in variants:
        safe = "".join(c if c.isalnum() or c in "._+=-" else "_" for c in variant)[:LONGEST]
        name, n = safe, 1
        while name in found.values():
            n += 1
            name = f"{safe}~{n}"
        found[variant] = name
    return found


class Trials:
    """Carries trials out; samples are loaded once.

    Args:
        folder: the study's folder; each run gets one inside.
        config_dir: a further folder of configs, or None.
        stop: the signals, entered.
        view: shows the progress of the trials.
        load: gives the samples, and keeps them.
    """

    def __init__(
        self,
        folder: Path,
        config_dir: Path | None,
        stop: StopSignals,
        view: StudyProgress,
        load: DataCache,
    ) -> None:
        self._folder, self._config_dir = folder, config_dir
        self._stop, self._view, self._load = stop, view, load
        self._warnings: set[str] = set()
        self._warm = False

    def run(self, trial: Trial) -> Outcome:
        """Carry a trial out, or find that it was.

        Raises:
            StudyStoppedError: a signal ended it; what was recorded stays.
        """
        self._view.begin(trial.variant, trial.seed)
        folder = self._folder / trial.name
        outcome = self._kept(trial, folder)
        if outcome is None:
            error = self._try(trial, folder)
            outcome = Outcome(trial, _summary(folder), error)
        self._view.end(trial.variant, outcome.summary, outcome.error)
        return outcome

    def _kept(self, trial: Trial, folder: Path) -> Outcome | None:
        """The outcome of a trial that ended before this process began."""
        found = _summary(folder)
        if found is None or found.status not in ("completed", "failed"):
            return None
        return Outcome(trial, found, found.error)

    def _try(self, trial: Trial, folder: Path) -> str | None:
        """Run it; the error where it failed."""
        try:
            status = self._carry_out(trial, folder)
        except MprunError as error:
            return str(error)
        if status != EXIT_OK:
            raise StudyStoppedError(status)
        return None

    def _carry_out(self, trial: Trial, folder: Path) -> int:
        saved = checkpoint.load(folder)
        if saved is not None:
            composed = compose([f"run.resume={quoted(folder)}"], self._config_dir)
        else:
            put_aside(folder)
            words = [*trial.words, f"seed={trial.seed}", f"run.dir={quoted(folder)}"]
            composed = compose(words, self._config_dir)
        chosen = plan(
            composed.config, composed.given, saved["choices"] if saved else None, self._load
        )
        self._warn(chosen)
        if not self._warm:
            warm_up(chosen)
            self._warm = True
        return run(
            chosen,
            composed.resolved,
            self._stop,
            Console(quiet=True),
            saved,
            view=lambda epochs, steps: _Progress(self._view, epochs, steps),
        )

    def _warn(self, chosen: Plan) -> None:
        for text in chosen.warnings:
            if text not in self._warnings:
                self._warnings.add(text)
                self._view.line(f"warning: {text}")


def warm_up(chosen: Plan) -> None:
    """A few steps that nobody records: a process's first ones find cold caches and no threads.

    What fails in them fails in the run that follows, which says so.
    """
    with suppress(Exception), backend_flags(chosen.policy, chosen.native_tf32):
        limits = Limits(None, WARM_UP_STEPS, None)
        Trainer(build_parts(chosen), limits, NoObserver(), lambda: False).fit()


def put_aside(folder: Path) -> None:
    """Rename what a killed run left in `folder`, if anything, so that it can begin anew."""
    if not folder.exists():
        return
    n = 1
    while (aside := folder.with_name(f"{folder.name}.abandoned-{n}")).exists():
        n += 1
    folder.rename(aside)


def _summary(folder: Path) -> Summary | None:
    try:
        return read_summary(folder)
    except MprunError:
        return None


@dataclass(frozen=True)
class _Progress(ProgressView):
    """A run's progress as the study's view shows it."""

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
