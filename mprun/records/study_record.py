"""sweep.json: the plan of a study, written into its folder before the first run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mprun.errors import UsageError
from mprun.records.files import write_new
from mprun.records.reader import read_json

SCHEMA_VERSION = 1
FILE = "sweep.json"


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """The runs of a study."""

    command: str
    """The command: sweep, advise or double."""
    variants: dict[str, tuple[str, ...]]
    """Name to overrides; the first is the baseline."""
    seeds: tuple[int, ...]
    config_dir: str | None
    """The user's own folder of configs."""
    of_trials: tuple[str, ...]
    """Overrides of all trials that define no variant: shorter training, no test set."""
    not_tried: dict[str, str] = field(default_factory=dict)
    """Variants left out, to the reason."""


def study_of_runs(runs: Sequence[Path]) -> Path | None:
    """The folder of the study that all these folders of runs are in; None without one."""
    folders = {run.resolve().parent for run in runs}
    folder = folders.pop() if len(folders) == 1 else None
    return folder if folder is not None and (folder / FILE).exists() else None


def write_study_plan(folder: Path, plan: StudyPlan) -> None:
    """Write sweep.json.

    Raises:
        FileExistsError: another process was quicker.
        OSError: the folder cannot be written.
    """
    text = json.dumps({"schema_version": SCHEMA_VERSION, **vars(plan)}, indent=1)
    write_new(folder / FILE, text.encode())


def read_study_plan(folder: Path) -> StudyPlan:
    """The plan in a study's folder.

    Raises:
        UsageError: there is none, it is damaged, or a later version of mprun wrote it.
    """
    try:
        return read_json(folder / FILE, StudyPlan, SCHEMA_VERSION)
    except FileNotFoundError as error:
        raise UsageError(
            f"run.resume={folder}: {folder / FILE} cannot be read ({error.strerror}); is {folder} "
            "a study?"
        ) from None
