"""A study: every variant with every seed, in one folder, interruptible and resumable.

The folder contains `sweep.json` (the plan), a run's folder for each trial, and `.claims/`. Any
number of processes may run it at once, on any machines that share the folder.

Times are compared in pairs of equal seed on one machine, so processes share the work by seeds.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from mprun.config import Composed, Config, compose
from mprun.config.schema import TrainConfig
from mprun.config.settings import StudyRequest, variants
from mprun.errors import RunFailedError, StoppedError, UsageError, printable
from mprun.records.console import note
from mprun.records.files import dated_folder, refuse_links, remove_leftovers
from mprun.records.run_folder import (
    FILE,
    RECIPE,
    LookPlan,
    StudyPlan,
    read_study_plan,
    write_study_plan,
)
from mprun.records.run_record import read_summary
from mprun.study.budget import BudgetSignals, TrialBudget
from mprun.study.settling import look_plan, settled
from mprun.study.trials import FOLDER as CLAIMS
from mprun.study.trials import Outcome, StudyProgress, Trial, TrialClaims, Trials, interleaved
from mprun.train.assemble import DataCache, make_plan, recipe_of, source_of
from mprun.train.assemble.plan import batch_sizes, data_request, planned_steps
from mprun.train.assemble.recipe_loading import lies_in

LOGS = ".launcher"  # The folder of a launcher's files in a study's: see `hydra_launch.py`
POLL_S = 0.5  # Seconds between two looks at the trials of other processes

# Maps the outcomes so far to the variants that need no more seeds, with the reason
Drop = Callable[[Sequence[Outcome]], Mapping[str, str]]


@dataclass(frozen=True)
class StudyResult:
    """What a study carried out, and what its budget left out."""

    outcomes: list[Outcome]
    not_run: dict[str, list[int]]  # Variant to seeds
    left_out_by: str = ""  # What left them out; empty: the budget


class StudyLoop:
    """Carries out the open trials of a study, beside other processes; as `Study.run`."""

    def __init__(
        self, study: Study, stop: BudgetSignals, progress: StudyProgress, drop: Drop | None
    ) -> None:
        self._study, self._planned, self._baseline = study, study.trials, study.baseline
        self._trials = Trials(
            study.folder, study.config_dir, stop, progress, study.load, study.untrusted
        )
        self._claims = TrialClaims(study.folder)
        self._stop, self._progress, self._drop = stop, progress, drop
        self._budget = TrialBudget(stop.budget)
        self._outcomes: dict[Trial, Outcome] = {}
        self._left_out: set[Trial] = set()
        self._dropped: set[str] = set()
        self._looked_after = 0  # Seeds

    def run(self) -> StudyResult:
        seeds = list(dict.fromkeys(trial.seed for trial in self._planned))
        while True:
            # Whole seeds first: the runs of a seed are compared as pairs, and have one machine then
            for seed in filter(self._open, seeds):
                with self._claims.held(f"seed{seed}") as mine:
                    if mine:
                        self._run_seed(seed)
            for seed in seeds:  # then single trials of the seeds that other processes work on
                self._run_seed(seed)
            waiting = [trial for seed in seeds for trial in self._open(seed)]
            if not waiting or self._stop.budget.is_over():
                break
            # The others run in other processes. If one is killed, its lock is free: the next round
            # takes its trial.
            self._progress.wait_for([f"{trial.variant} seed {trial.seed}" for trial in waiting])
            time.sleep(POLL_S)
        return self._result(waiting)

    def _result(self, waiting: Sequence[Trial]) -> StudyResult:
        """The outcomes, and the trials that are left, with what other processes did meanwhile."""
        # A full disk or a kill is no result: another process may have run the trial again since
        by_machine = {trial for trial, outcome in self._outcomes.items() if outcome.by_machine}
        unfinished = [x for x in self._planned if x in {*self._left_out, *waiting, *by_machine}]
        for trial in unfinished:
            if self._trials.has_ended(trial):  # in another process, by now
                self._outcomes[trial] = self._trials.run(trial)
        not_run: dict[str, list[int]] = {}
        for trial in unfinished:
            if trial not in self._outcomes:
                not_run.setdefault(trial.variant, []).append(trial.seed)
        return StudyResult(list(self._outcomes.values()), not_run)

    def _open(self, seed: int) -> list[Trial]:
        """The trials of a seed that have no outcome yet, as far as this process knows."""
        return [
            trial
            for trial in self._planned
            if trial.seed == seed
            and trial not in self._outcomes
            and trial not in self._left_out
            # what has ended is read all the same
            and (trial.variant not in self._dropped or self._trials.has_ended(trial))
        ]

    def _run_seed(self, seed: int) -> None:
        """Carry out the open trials of a seed, except those that other processes run."""
        trials = self._open(seed)
        # Before the baseline's trial, a trial may begin only if the budget has room for both: alone
        # it would be no pair
        is_partner_open = self._baseline in {trial.variant for trial in trials}
        for trial in trials:
            is_partner_open &= trial.variant != self._baseline
            self._take(trial, self._baseline if is_partner_open else None)
        if trials:
            self._drop_variants()

    def _drop_variants(self) -> None:
        """Give no more seeds to variants that cannot win, or that a look has closed."""
        if self._drop is not None:
            self._dropped |= set(self._drop(list(self._outcomes.values())))
        plan = self._study.plan
        so_far = settled(self._study.folder, plan)
        self._dropped |= so_far.closed.keys()
        if plan.looks is not None:  # nor to those of which no run of the first look could start
            tries = Counter(o.trial.variant for o in self._outcomes.values() if o.summary is None)
            self._dropped |= {x for x, n in tries.items() if n >= plan.looks.seeds[0]}
        if so_far.after > self._looked_after:
            self._looked_after = so_far.after
            self._progress.look(so_far.lines)
        self._progress.drop(self._dropped)

    def _take(self, trial: Trial, partner: str | None) -> None:
        """Carry out a trial, unless it is over, another process runs it, or the budget ends."""
        if self._trials.has_ended(trial):
            self._run_in_budget(trial)
            return
        with self._claims.held(trial.name) as mine:
            if not mine or self._trials.has_ended(trial):  # a moment ago, in another process
                return
            if self._budget.admits(trial.variant, partner):
                self._claims.record_start(trial.name)
                self._run_in_budget(trial)
            else:
                self._left_out.add(trial)

    def _run_in_budget(self, trial: Trial) -> None:
        """Run a trial and store its outcome, unless the budget ends it."""
        began_s = self._stop.budget.now_s
        try:
            outcome = self._trials.run(trial)
        except StoppedError:
            if self._stop.received is not None:  # a signal, not the budget
                raise
            self._left_out.add(trial)
            return
        # A trial of an earlier process is only read here: its record says how long it took
        earlier_s = 0.0 if outcome.summary is None else outcome.summary.wall_time_s
        self._budget.took(trial.variant, max(self._stop.budget.now_s - began_s, earlier_s))
        self._outcomes[trial] = outcome


# Temporary files older than this belong to no process that still runs: a file is written in seconds
LEFTOVER_S = 3600.0


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
        """Carry out all trials that the budget admits, except further seeds of those to `drop`.

        Raises:
            UsageError: the folder cannot be written, or the study's samples cannot be loaded.
            StoppedError: a signal ended a trial.
        """
        config = compose(self.trials[0].overrides, self.config_dir).config
        _check_recipe_file(self, config)
        loop = StudyLoop(self, stop, progress, drop)  # it refuses a folder that cannot be written
        remove_leftovers(self.folder, LEFTOVER_S)
        # before the first run, because an error in the samples would end every run
        self.load(recipe_of(config, self.untrusted), data_request(config))
        return loop.run()

    def judged_by(self, outcomes: Sequence[Outcome]) -> tuple[str, str]:
        """The baseline's hash, and the samples for a choice between variants: never the test set.

        Raises:
            RunFailedError: the baseline has no completed run.
        """
        for o in outcomes:
            if o.trial.variant == self.baseline and o.error is None and o.summary is not None:
                held_out = o.summary.data.validation_samples  # None for a stream
                return o.summary.variant_hash, "train" if held_out == 0 else "validation"
        if self.baseline not in {o.trial.variant for o in outcomes}:
            raise RunFailedError(
                f"the budget ended before a run of {self.baseline}, the baseline, was complete; "
                f"continue with: {self.resume_command}"
            )
        raise RunFailedError(f"{self.baseline}, the baseline, failed in every run")


def _check_recipe_file(study: Study, config: Config) -> None:
    """Refuse to continue with another file of the recipe than that of the first runs."""
    source = source_of(config)
    if source is None:
        return
    for trial in study.trials:
        try:
            summary = read_summary(study.folder / trial.name)
        except UsageError:  # it has not begun
            continue
        # None: that run's recipe came by name, or the record is older than this field
        known = (None, source.sha256)
        if summary.recipe == config.recipe.name and summary.recipe_sha256 not in known:
            raise UsageError(
                f"run.resume={study.folder}: {source.path} was changed since the study began; put "
                f"it back as it was ({study.folder / trial.name / RECIPE} is a copy), or begin a "
                "new study with it"
            )


def new_study(
    request: StudyRequest,
    overrides: Mapping[str, Sequence[str]],
    *,
    of_trials: Sequence[str] = (),
    not_tried: Mapping[str, str] | None = None,
    load: DataCache | None = None,
) -> Study:
    """A study in a new folder, its plan written; or the same study that another process has begun.

    The first variant of `overrides` is the baseline; for `of_trials`, `not_tried` see `StudyPlan`.

    Raises:
        UsageError: the folder has something else in it, or cannot be written.
    """
    study_plan = StudyPlan(
        command=request.command,
        variants={name: tuple(texts) for name, texts in overrides.items()},
        seeds=tuple(request.seeds),
        config_dir=None if request.config_dir is None else str(request.config_dir.resolve()),
        of_trials=tuple(of_trials),
        not_tried=dict(not_tried or {}),
        looks=_looks(request, [*next(iter(overrides.values())), *of_trials], load or DataCache()),
    )
    path = dated_folder() if request.folder is None else Path(request.folder)
    load = load or DataCache()
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = _foreign(path)
        if taken is None:
            with suppress(FileExistsError):  # another process was quicker
                write_study_plan(path, study_plan)
                return Study(path, study_plan, load)
    except OSError as error:
        raise UsageError(f"run.dir={path} cannot be written ({error.strerror})") from None
    if not (path / FILE).exists():
        raise UsageError(f"run.dir={path} already contains {taken}; choose another folder")
    study = resumed_study(request.command, path, request.trust)  # this process helps with it
    # Why a mode is not tried is a sentence with facts of the machine: it may differ elsewhere
    if replace(study.plan, not_tried=study_plan.not_tried) != study_plan:
        raise UsageError(
            f"run.dir={path} has {FILE} of another study already; choose another folder, or "
            f"resume that study: run.resume={path}"
        )
    note(f"{path} has this study already; its open runs are continued")
    return replace(study, load=load)


def _looks(request: StudyRequest, overrides: Sequence[str], load: DataCache) -> LookPlan | None:
    """The looks of a new study, whose baseline has these overrides; None for a fixed number."""
    if not request.is_auto:
        return None
    config = compose(overrides, request.config_dir).config
    recipe = recipe_of(config)
    splits, split = load(recipe, data_request(config)), request.settings.compare.split
    if split == "auto":
        is_tested = config.data.test and not splits.test.is_empty
        held_out = "train" if splits.validation.is_empty else "validation"
        split = "test" if is_tested else held_out
    settings = request.settings
    return look_plan(settings.seeds_limit, recipe.METRIC[0], split, settings.compare)


def _foreign(folder: Path) -> str | None:
    """What is in a folder besides another process's draft of a plan; None if nothing is."""
    names = {path.name for path in folder.iterdir()}
    # `write_study_plan` writes a draft of this name first, so that no process reads half a plan
    return next((name for name in sorted(names) if not name.startswith(f".{FILE}.")), None)


def new_sweep(request: StudyRequest) -> Study:
    """A study of every variant that the overrides give.

    Raises:
        UsageError: anything wrong with the overrides, the samples or the folder.
    """
    sweep, load = variants(request.overrides, request.config_dir), DataCache()
    first = compose(next(iter(sweep.overrides.values())), request.config_dir)
    more = scored_more(first, load)  # an error in the samples would end every run
    return new_study(request, sweep.overrides, of_trials=more, not_tried=sweep.left_out, load=load)


def resumed_study(command: str, folder: Path, trust: bool = False) -> Study:
    """The study of this command in `folder`; `trust`: whether code that lies in it may run.

    Raises:
        UsageError: there is none that this version can read, it is another command's, or it asks
            for more than a study that is not trusted may.
    """
    # A link in a folder of someone else would make mprun write, or lock, files outside of it
    refuse_links(folder, [FILE, CLAIMS, LOGS])
    refuse_links(folder / CLAIMS, [path.name for path in (folder / CLAIMS).glob("*")])
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
    # Names are shown on a terminal, where control characters could hide or fake output
    if not all(name.isprintable() for name in plan.variants):
        raise UsageError(f"{folder / FILE} is damaged: a variant has no name that can be printed")
    for text in (*plan.of_trials, *chain(*plan.variants.values())):
        # These choose where files are written, and the server that a record is sent to
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


STUDIED = {"validations": 10, "average_weights": 5}
"""What a study sets of `train` in its runs: a curve of validations, and less noise of the last step
in what verdicts are about."""


def scored_more(composed: Composed, load: DataCache) -> list[str]:
    """Overrides for the runs of a study: `STUDIED`, without what the user has set.

    None where the number of steps is not planned, or where there are no samples to score.
    """
    config, train = composed.config, composed.config.train
    splits = load(recipe_of(config), data_request(config))
    batch, _ = batch_sizes(config, splits.train.own_batch_size)
    if planned_steps(config, splits, batch) is None:
        return []
    default, has_test = TrainConfig(), config.data.test and not splits.test.is_empty
    return [
        f"train.{name}={value}"
        for name, value in STUDIED.items()
        if not splits.validation.is_empty or (has_test and name == "average_weights")
        if f"train.{name}" not in composed.given and getattr(train, name) == getattr(default, name)
    ]


def held_out(composed: Composed, load: DataCache) -> list[str]:
    """Overrides for a study that selects something: with validation data, without a test."""
    planned = make_plan(composed.config, composed.given, load=load)
    # A test set on which a mode was selected is no test set any more
    overrides = [] if planned.splits.test.is_empty else ["data.test=false"]
    takes_share = "data.validation_fraction" not in planned.recipe.ignores
    if planned.splits.validation.is_empty and takes_share:
        overrides.append("data.validation_fraction=0.1")
    return overrides
