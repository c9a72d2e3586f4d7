"""A study: every variant with every seed, in one folder, interruptible and resumable.

The folder contains `sweep.json` (the plan) and a run's folder for each trial.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from filelock import FileLock, Timeout

from mprun.assemble import DataCache, make_plan, recipe_of, source_of
from mprun.assemble.plan import data_request
from mprun.assemble.recipe_origin import lies_in
from mprun.config import Composed, Config, compose
from mprun.config.settings import Split
from mprun.config.study_request import StudyRequest
from mprun.config.variants import variants
from mprun.console import note
from mprun.errors import RunFailedError, StoppedError, UsageError, printable
from mprun.experiments.budget import BudgetSignals, TrialBudget
from mprun.experiments.study_progress import StudyProgress
from mprun.experiments.trials import Outcome, Trial, Trials, interleaved
from mprun.records.files import new_folder, refuse_links, remove_leftovers
from mprun.records.run_folder import RECIPE
from mprun.records.run_record import read_summary
from mprun.records.study_record import FILE, StudyPlan, read_study_plan, write_study_plan

Drop = Callable[[Sequence[Outcome]], Mapping[str, str]]
"""Maps the outcomes so far to the variants that need no more seeds, with the reason."""


@dataclass(frozen=True)
class StudyResult:
    """What a study carried out, and what its budget left out."""

    outcomes: list[Outcome]
    not_run: dict[str, list[int]]
    """Variant to seeds."""


@dataclass(frozen=True)
class Study:
    """A plan and the folder it is carried out in."""

    folder: Path
    plan: StudyPlan
    load: DataCache = field(default_factory=DataCache, compare=False)
    trusted: bool = field(default=True, compare=False)
    """Whether recipe code that lies in the folder may run; see `run.trust`."""

    @property
    def config_dir(self) -> Path | None:
        """The user's own folder of configs."""
        return None if self.plan.config_dir is None else Path(self.plan.config_dir)

    @property
    def untrusted(self) -> Path | None:
        """The folder, unless its code may run."""
        return None if self.trusted else self.folder

    @property
    def baseline(self) -> str:
        """The variant that the others are compared with."""
        return next(iter(self.plan.variants))

    @property
    def resume_command(self) -> str:
        """The command that continues it."""
        return f"mprun {self.plan.command} {shlex.quote(f'run.resume={self.folder}')}"

    @property
    def trials(self) -> list[Trial]:
        """In the order of the runs."""
        all_overrides = {k: (*v, *self.plan.of_trials) for k, v in self.plan.variants.items()}
        return interleaved(all_overrides, self.plan.seeds)

    def run(
        self, stop: BudgetSignals, progress: StudyProgress, drop: Drop | None = None
    ) -> StudyResult:
        """Carry out all trials that the budget admits, except further seeds of dropped variants.

        Args:
            stop: the signals and the budget, entered.
            progress: shows the trials.
            drop: returns the variants to drop.

        Raises:
            UsageError: another process is running the study, or its samples cannot be loaded.
            StoppedError: a signal ended a trial.
        """
        outcomes: list[Outcome] = []
        dropped: set[str] = set()
        budget = TrialBudget(stop.budget)
        with _locked(self.folder):
            first, config_dir = self.trials[0].overrides, self.config_dir
            _check_recipe_file(self, compose(first, config_dir).config)
            load_samples(first, config_dir, self.load, self.untrusted)
            trials = Trials(self.folder, config_dir, stop, progress, self.load, self.untrusted)
            for seed in self.plan.seeds:
                of_seed = [t for t in self.trials if t.seed == seed and t.variant not in dropped]
                partner: str | None = self.baseline  # whose trial of this seed is still to come
                for trial in of_seed:
                    partner = None if trial.variant == self.baseline else partner
                    if trials.has_ended(trial) or budget.admits(trial.variant, seed, partner):
                        outcomes += _run_in_budget(trials, trial, budget, stop)
                if drop is not None:
                    dropped |= set(drop(outcomes))
                    progress.drop(dropped)
        return StudyResult(outcomes, budget.not_run)

    def judged_by(self, outcomes: Sequence[Outcome]) -> tuple[str, Split]:
        """The baseline's hash, and the samples for a choice between variants: never the test set.

        Raises:
            RunFailedError: the baseline has no completed run.
        """
        for o in outcomes:
            if o.trial.variant == self.baseline and o.error is None and o.summary is not None:
                held_out = o.summary.data.validation_samples
                return o.summary.variant_hash, Split.train if held_out == 0 else Split.validation
        if self.baseline not in {o.trial.variant for o in outcomes}:
            raise RunFailedError(
                f"the budget ended before a run of {self.baseline}, the baseline, was complete; "
                f"continue with: {self.resume_command}"
            )
        raise RunFailedError(f"{self.baseline}, the baseline, failed in every run")


def _check_recipe_file(study: Study, config: Config) -> None:
    """Refuse to continue a study with another file of its recipe than that of its first runs.

    Raises:
        UsageError: the file was changed, or cannot be read.
    """
    source = source_of(config)
    if source is None:
        return
    for trial in study.trials:
        try:
            summary = read_summary(study.folder / trial.name)
        except UsageError:  # it has not begun
            continue
        is_same = summary.recipe_sha256 in (None, source.sha256)
        if summary.recipe == config.recipe.name and not is_same:
            raise UsageError(
                f"run.resume={study.folder}: {source.path} was changed since the study began; put "
                f"it back as it was ({study.folder / trial.name / RECIPE} is a copy), or begin a "
                "new study with it"
            )


def _run_in_budget(
    trials: Trials, trial: Trial, budget: TrialBudget, stop: BudgetSignals
) -> list[Outcome]:
    """The outcome of a trial; nothing if the budget ends it.

    Raises:
        StoppedError: a signal ended it.
    """
    began_s = stop.budget.now_s
    try:
        outcome = trials.run(trial)
    except StoppedError:
        if stop.received is not None:
            raise
        budget.leave_out(trial.variant, trial.seed)
        return []
    earlier_s = 0.0 if outcome.summary is None else outcome.summary.wall_time_s
    budget.took(trial.variant, max(stop.budget.now_s - began_s, earlier_s))
    return [outcome]


def new_study(
    request: StudyRequest,
    overrides: Mapping[str, Sequence[str]],
    *,
    of_trials: Sequence[str] = (),
    not_tried: Mapping[str, str] | None = None,
    load: DataCache | None = None,
) -> Study:
    """A study in a new folder, its plan written.

    Args:
        request: the arguments.
        overrides: of each variant, by name; the first is the baseline.
        of_trials: see `StudyPlan`.
        not_tried: see `StudyPlan`.
        load: loads the samples once.

    Raises:
        UsageError: the folder is not empty, or cannot be written.
    """
    folder = request.folder
    if folder is not None and (Path(folder) / FILE).exists():
        raise UsageError(
            f"run.dir={folder} has {FILE} already; choose another folder, or resume the study: "
            f"run.resume={folder}"
        )
    study_plan = StudyPlan(
        command=request.command,
        variants={name: tuple(texts) for name, texts in overrides.items()},
        seeds=tuple(request.seeds),
        config_dir=None if request.config_dir is None else str(request.config_dir.resolve()),
        of_trials=tuple(of_trials),
        not_tried=dict(not_tried or {}),
    )
    path = new_folder(folder)
    try:
        write_study_plan(path, study_plan)
    except FileExistsError:
        raise UsageError(
            f"run.dir={path}: another mprun begins a study there; choose another folder"
        ) from None
    except OSError as error:
        raise UsageError(f"run.dir={path} cannot be written ({error.strerror})") from None
    return Study(path, study_plan, load or DataCache())


def new_sweep(request: StudyRequest) -> Study:
    """A study of every variant that the overrides give.

    Raises:
        UsageError: anything wrong with the overrides, the samples or the folder.
    """
    sweep, load = variants(request.overrides, request.config_dir), DataCache()
    load_samples(next(iter(sweep.overrides.values())), request.config_dir, load)
    return new_study(request, sweep.overrides, not_tried=sweep.left_out, load=load)


def resumed_study(command: str, folder: Path, trust: bool = False) -> Study:
    """The study of this command in `folder`.

    Args:
        command: its name.
        folder: the study's.
        trust: whether code that lies in the folder may run, and its overrides be interpolated.

    Raises:
        UsageError: it does not exist, is another command's, a later version of mprun wrote it, or
            it asks for more than a study that is not trusted may.
    """
    refuse_links(folder, [FILE, ".lock"])
    study_plan = read_study_plan(folder)
    if study_plan.command != command:  # another study has other samples and another question
        raise UsageError(
            f"run.resume={folder}: this is a study of mprun {study_plan.command}; resume it with: "
            f"mprun {study_plan.command} run.resume={shlex.quote(str(folder))}"
        )
    if not trust:
        _check_untrusted(folder, study_plan)
    return Study(folder, study_plan, trusted=trust)


def _check_untrusted(folder: Path, plan: StudyPlan) -> None:
    """Refuse what someone who made the folder could do to the user who resumes it."""
    refuse_links(folder, [path.name for path in folder.iterdir()])
    trust = "if the study is yours, add run.trust=true"
    if not all(name.isprintable() for name in plan.variants):
        raise UsageError(f"{folder / FILE} is damaged: a variant has no name that can be printed")
    for text in (*plan.of_trials, *chain(*plan.variants.values())):
        if text.lstrip("+").startswith(("run.", "logger.uri")):
            raise UsageError(f"run.resume={folder}: {FILE} contains '{printable(text)}'; {trust}")
        if "${" in text:
            raise UsageError(
                f"run.resume={folder}: {FILE} contains '{printable(text)}', which can read "
                f"environment variables into the record; {trust}"
            )
    if plan.config_dir is None:
        return
    if lies_in(Path(plan.config_dir), folder):
        raise UsageError(
            f"run.resume={folder}: {FILE} takes configurations from {plan.config_dir}, a part of "
            f"the study itself; {trust}"
        )
    note(f"{folder / FILE} takes configurations from {plan.config_dir}")


def load_samples(
    overrides: Sequence[str],
    config_dir: Path | None,
    load: DataCache,
    untrusted: Path | None = None,
) -> None:
    """Load the samples before the first run: an error in them is an error in every run.

    Args:
        overrides: of a run.
        config_dir: a further folder of configs, or None.
        load: loads them.
        untrusted: a folder whose code is not run, or None.
    """
    config = compose(overrides, config_dir).config
    recipe = recipe_of(config, untrusted)
    load(recipe, data_request(config))


def held_out(composed: Composed, load: DataCache) -> list[str]:
    """Overrides for a study that selects something: with validation data, without a test.

    Raises:
        UsageError: the run cannot be planned.
    """
    planned = make_plan(composed.config, composed.given, load=load)
    overrides = [] if planned.splits.test.is_empty else ["data.test=false"]
    takes_share = "data.validation_fraction" not in planned.recipe.ignores
    if planned.splits.validation.is_empty and takes_share:
        overrides.append("data.validation_fraction=0.1")
    return overrides


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the study: inside, no other process runs it."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(f"{folder}: another mprun is running this study; wait for it") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror})") from None
    try:
        remove_leftovers(folder)
        yield
    finally:
        lock.release()
