"""The parsed arguments of a command that runs a study: sweep, advise or double."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Override

from mprun.config.compose import parse
from mprun.config.recipe_file import quoted, with_absolute_paths
from mprun.config.settings import SEEDS, Settings, take
from mprun.config.validate import PATHS
from mprun.errors import UsageError

RESUMED = "a resumed study keeps its plan"


@dataclass(frozen=True)
class StudyRequest:
    """The arguments of a study."""

    command: str
    settings: Settings
    overrides: list[str]
    """Of the runs; paths in them are absolute."""
    config_dir: Path | None
    folder: str | None
    """`run.dir`."""
    resume: Path | None
    """`run.resume`."""
    trust: bool = False
    """`run.trust`."""
    hydra: tuple[str, ...] = ()
    """Overrides of Hydra's launcher."""

    @property
    def seeds(self) -> range:
        """The seeds of a new study."""
        first = self.settings.first_seed
        return range(first, first + (self.settings.seeds or SEEDS[self.command]))


def study_request(
    command: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    *sections: str,
    refused: Sequence[str] = (),
) -> StudyRequest:
    """Separate the settings of a study from the overrides of its runs.

    Args:
        command: its name.
        overrides: settings and overrides.
        config_dir: a further folder of configs, or None.
        sections: settings it takes, beside `compare`, `seeds` and `first_seed`.
        refused: settings that the command sets itself.

    Raises:
        UsageError: a setting that is not legal, or one that a resumed study keeps.
    """
    settings, rest = take(overrides, "compare", "seeds", "first_seed", *sections)
    _refuse(overrides, refused, f"mprun {command} sets this itself")
    folders: dict[str, str] = {}
    of_runs, trust, hydra = [], False, []
    for text in rest:
        override = parse(text)
        key, value = override.key_or_group, override.value()
        if key in ("run.dir", "run.resume"):
            folders |= _folder(override)
        elif key == "run.trust":
            trust = _truth(text, value)
        elif key.startswith(("hydra/launcher", "hydra.launcher.")) and "launcher" in sections:
            hydra.append(text)
        elif key in PATHS and isinstance(value, str):
            of_runs.append(f"{key}={quoted(Path(value).absolute())}")
        else:
            of_runs.append(with_absolute_paths(override) if key == "recipe" else text)
    resume = folders.get("run.resume")
    if resume is not None:
        if of_runs:
            raise UsageError(f"'{of_runs[0]}': {RESUMED}; leave it out")
        if config_dir is not None:
            raise UsageError(f"--config-dir {config_dir}: {RESUMED}; leave it out")
        _refuse(overrides, ("seeds", "first_seed", "advise.max_steps", "run.dir"), RESUMED)
    return StudyRequest(
        command,
        settings,
        of_runs,
        config_dir,
        folders.get("run.dir"),
        None if resume is None else Path(resume),
        trust,
        tuple(hydra),
    )


def _truth(text: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"'{text}': run.trust is true or false")
    return value


def _folder(override: Override) -> dict[str, str]:
    """The folder that an override names, by the key of the override; nothing for null."""
    key, value = override.key_or_group, override.value()
    if override.is_delete() or override.is_sweep_override() or isinstance(value, dict | list):
        raise UsageError(f"'{override.input_line}': legal is the name of one folder, or null")
    if value is None:
        return {}
    if not str(value).strip() or "\0" in str(value):
        raise UsageError(f"{key}={str(value)!r}: legal is the name of a folder, or null")
    return {key: str(value)}


def _refuse(overrides: Sequence[str], keys: Sequence[str], reason: str) -> None:
    for text in overrides:
        if text.lstrip("+").partition("=")[0] in keys:
            raise UsageError(f"'{text}': {reason}; leave it out")
