"""A sweep: every variant with every seed, in one folder, interruptible and resumable.

The folder holds `sweep.json` (the plan) and a run's folder for each trial.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mprun.errors import UsageError
from mprun.experiments.trials import Outcome, Trial, Trials, interleaved
from mprun.records.files import dated_folder, write_json
from mprun.records.reader import read_json
from mprun.records.sweep_plan import SCHEMA_VERSION, SweepPlan

PLAN = "sweep.json"

Drop = Callable[[Sequence[Outcome]], Mapping[str, str]]
"""The outcomes so far to the variants that need no more seeds, with why."""


@dataclass(frozen=True)
class Sweep:
    """What is to be run."""

    command: str
    """Which command it is a study of: sweep, advise or double."""
    folder: Path
    variants: dict[str, tuple[str, ...]]
    """Name to overrides."""
    seeds: tuple[int, ...]
    config_dir: Path | None
    of_trials: tuple[str, ...] = ()
    """Overrides of the trials that are no part of a variant: shorter, without the test set."""
    not_tried: dict[str, str] = field(default_factory=dict)
    """Variants that the study leaves out, to the reason."""

    @property
    def trials(self) -> list[Trial]:
        """In the order they are run in."""
        words = {name: (*found, *self.of_trials) for name, found in self.variants.items()}
        return interleaved(words, self.seeds)

    def run(self, trials: Trials, drop: Drop | None = None) -> list[Outcome]:
        """Carry all of them out, but for the variants that `drop` names between two seeds."""
        outcomes: list[Outcome] = []
        dropped: set[str] = set()
        for seed in self.seeds:
            of_seed = [t for t in self.trials if t.seed == seed and t.variant not in dropped]
            outcomes += [trials.run(trial) for trial in of_seed]
            if drop is not None:
                dropped |= set(drop(outcomes))
        return outcomes


def new_sweep(
    command: str,
    variants: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    folder: str | None = None,
    config_dir: Path | None = None,
    of_trials: Sequence[str] = (),
    not_tried: Mapping[str, str] | None = None,
) -> Sweep:
    """A sweep in a folder of its own, its plan written.

    Raises:
        UsageError: the folder holds something already, or cannot be written.
    """
    path = dated_folder() if folder is None else Path(folder)
    words = {name: tuple(found) for name, found in variants.items()}
    sweep = Sweep(
        command, path, words, tuple(seeds), config_dir, tuple(of_trials), dict(not_tried or {})
    )
    plan = SweepPlan(
        schema_version=SCHEMA_VERSION,
        command=command,
        variants={name: list(overrides) for name, overrides in variants.items()},
        seeds=list(seeds),
        of_trials=list(of_trials),
        config_dir=str(config_dir.resolve()) if config_dir else None,
        not_tried=dict(not_tried or {}),
    )
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = next(path.iterdir(), None)
        if taken is None:
            write_json(path / PLAN, asdict(plan))
    except OSError as error:
        raise UsageError(f"run.dir={path} cannot be written ({error.strerror})") from None
    if taken is not None:
        raise UsageError(
            f"run.dir={path} holds {taken.name} already; choose another folder, or resume the "
            f"sweep that is there: run.resume={path}"
        )
    return sweep


def read_sweep(command: str, folder: Path) -> Sweep:
    """The study of this command kept in `folder`.

    Raises:
        UsageError: none is there, it is another command's, or a later version of mprun wrote it.
    """
    path = folder / PLAN
    try:
        plan = read_json(path, SweepPlan, SCHEMA_VERSION)
    except FileNotFoundError as error:
        raise UsageError(
            f"run.resume={folder}: {path} cannot be read ({error.strerror}); is it a sweep?"
        ) from None
    if plan.command != command:  # another study has other samples, and another question
        raise UsageError(
            f"run.resume={folder}: this is a study of mprun {plan.command}; resume it with: "
            f"mprun {plan.command} "
            f"run.resume={shlex.quote(str(folder))}"
        )
    return Sweep(
        command,
        folder,
        {name: tuple(overrides) for name, overrides in plan.variants.items()},
        tuple(plan.seeds),
        Path(plan.config_dir) if plan.config_dir else None,
        tuple(plan.of_trials),
        plan.not_tried,
    )
