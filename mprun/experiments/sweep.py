"""A sweep: every variant with every seed, kept in one folder, to be stopped and gone on with.

The folder holds `sweep.json` (the plan) and a run's folder for each trial.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mprun.errors import UsageError
from mprun.experiments.trials import Outcome, Trial, Trials, interleaved
from mprun.records.run_record import dated_folder, write_atomic

SCHEMA_VERSION = 1
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
    kept = asdict(sweep) | {"folder": None, "config_dir": config_dir and str(config_dir.resolve())}
    text = json.dumps({"schema_version": SCHEMA_VERSION, **kept}, indent=1)
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = next(path.iterdir(), None)
        if taken is None:
            write_atomic(path / PLAN, text.encode())
    except OSError as error:
        raise UsageError(f"run.dir={path} cannot be written ({error.strerror})") from None
    if taken is not None:
        raise UsageError(
            f"run.dir={path} holds {taken.name} already; choose another folder, or go on with a "
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
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, of = int(kept["schema_version"]), str(kept["command"])
        variants = {str(k): tuple(map(str, v)) for k, v in kept["variants"].items()}
        seeds = tuple(int(seed) for seed in kept["seeds"])
        of_trials = tuple(map(str, kept["of_trials"]))
        config_dir = kept["config_dir"] and Path(kept["config_dir"])
        not_tried = {str(k): str(v) for k, v in kept.get("not_tried", {}).items()}
    except OSError as error:
        raise UsageError(
            f"run.resume={folder}: {path} cannot be read ({error.strerror}); is it a sweep?"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"run.resume={folder}: {path} is no plan of a sweep") from None
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{path} has schema_version {version}, this mprun reads up to {SCHEMA_VERSION}"
        )
    if of != command:  # another study has other samples, and another question
        raise UsageError(
            f"run.resume={folder}: this is a study of mprun {of}; go on with: mprun {of} "
            f"run.resume={shlex.quote(str(folder))}"
        )
    return Sweep(command, folder, variants, seeds, config_dir, of_trials, not_tried)
