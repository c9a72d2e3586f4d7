"""The settings of commands: `compare.margin=0.01`, `seeds=5`.

They are not part of a run's configuration, so they do not change its variant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar, cast

from hydra.core.override_parser.types import Override
from msgspec import Meta
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config.compose import single
from mprun.config.reference import GROUPS, Field, keys_called, leaves, walk
from mprun.errors import UsageError, did_you_mean, first_line, hint
from mprun.records.policy_columns import Count, Legal, Positive, Share

T = TypeVar("T")

MARGIN, RELATIVE_MARGIN = 0.005, 0.02
"""Smaller differences do not matter: of accuracies; of losses, as a share of the baseline's."""
Margin = Annotated[float, Meta(gt=0, le=0.1)]
"""0.5, written for half a point, would make everything equivalent."""
RelativeMargin = Annotated[float, Meta(gt=0, le=1)]
PROCESSES = 4
"""Processes of a study if `launcher.processes` is null."""
LAUNCHER = "launcher.name"
"""The field behind `launcher=NAME`."""
SEEDS = {"sweep": 5, "advise": 10, "double": 10}
"""Runs of each variant if `seeds` is null."""


@dataclass
class CompareSettings:
    """How runs are compared."""

    margin: Margin = MARGIN
    """Differences of accuracy (0.005 is half a point), or another fraction, that do not matter."""
    relative_margin: RelativeMargin = RELATIVE_MARGIN
    """For losses and all other metrics, as a share of the baseline's."""
    baseline: str | None = None
    """Label or hash of the variant the others are compared with; null for fp32."""
    split: Annotated[str, Legal("auto", "test", "validation", "train")] = "auto"
    """Which samples the metric is computed on: auto, test, validation or train."""
    mix: list[Annotated[str, Legal("recipes", "data", "hardware", "code")]] = field(
        default_factory=list
    )
    """What may differ between runs: [recipes, data, hardware, code]; by default nothing."""
    fail_if: Annotated[str, Legal("none", "worse", "not_equivalent")] = "none"
    """End with status 3 if a variant is worse, or is not shown to be equivalent or better."""
    dir: str | None = None
    """Folder of the report; null: the one folder compared, or comparison/ here."""
    report: bool = True
    """Whether the report is written, beside the table that is printed."""


@dataclass
class SweepSettings:
    """How many trials a sweep makes."""

    budget_min: Positive | None = None
    """Minutes for the sweep; trials that would exceed them are left out. null: no limit."""


@dataclass
class LauncherSettings:
    """Which processes run a study's trials."""

    name: Annotated[str, Legal("local", "joblib", "submitit")] = "local"
    """What runs the trials: local (this process), joblib (processes here) or submitit (jobs)."""
    processes: Count | None = None
    """Processes of joblib, or jobs of submitit (a job array on Slurm); null for 4."""
    executor: Annotated[str, Legal("auto", "local", "slurm", "debug")] = "auto"
    """Of submitit: auto, slurm, local (jobs on this machine) or debug (in this process)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of submitit, its parameters: {slurm_partition: gpu, timeout_min: 60, gpus_per_node: 1}."""

    def check(self) -> None:
        """Refuse fields that the launcher does not have.

        Raises:
            UsageError: there is one.
        """
        executor = None if self.executor == "auto" else self.executor
        given: dict[str, tuple[Any, tuple[str, ...]]] = {
            "launcher.processes": (self.processes, ("joblib", "submitit")),
            "launcher.executor": (executor, ("submitit",)),
            "launcher.options": (self.options or None, ("submitit",)),
        }
        for key, (value, launchers) in given.items():
            if value is not None and self.name not in launchers:
                legal = " or ".join(f"launcher={name}" for name in launchers)
                raise UsageError(
                    f"{key}={value} has no effect with launcher={self.name}; add {legal}, or "
                    "leave it out"
                )


@dataclass
class AdviseSettings:
    """How a mode is recommended."""

    objective: Annotated[str, Legal("time", "memory")] = "time"
    """What is minimized: time (of a step) or memory (at its peak)."""
    max_steps: Count = 500
    """Steps of a trial, if train.max_steps is null."""
    screen: Count = 2
    """After this many pairs, a mode that was slower in every one is dropped."""
    budget_min: Positive | None = None
    """Minutes for the study; trials that would exceed them are left out. null: no limit."""


@dataclass
class DoubleSettings:
    """How a doubled batch is judged."""

    until_oom: bool = False
    """Search the largest batch that fits instead (CUDA)."""
    headroom: Share = 0.1
    """Share taken off the largest batch that fits."""


@dataclass
class Settings:
    """The settings of studies, and those that several commands take.

    A command's own section is a dataclass in its module of `mprun.inspect`: `own` returns it.
    """

    compare: CompareSettings = field(default_factory=CompareSettings)
    """How runs are compared."""
    sweep: SweepSettings = field(default_factory=SweepSettings)
    """How many trials a sweep makes."""
    launcher: LauncherSettings = field(default_factory=LauncherSettings)
    """Which processes run a study's trials."""
    advise: AdviseSettings = field(default_factory=AdviseSettings)
    """How a mode is recommended."""
    double: DoubleSettings = field(default_factory=DoubleSettings)
    """How a doubled batch is judged."""
    seeds: Count | None = None
    """Runs of each variant; null for 5, in advise and double 10."""
    first_seed: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """The first seed; the others follow. A higher one makes a study with fresh seeds."""

    def own(self, section: type[T]) -> T:
        """The section of a command, of the class that was given to `take`."""
        value: T = getattr(self, section_of(section))
        return value


def section_of(part: str | type) -> str:
    """The first part of a section's keys: `search_ops` of the class `SearchOpsSettings`."""
    name = part if isinstance(part, str) else part.__name__.removesuffix("Settings")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def fields(sections: Sequence[str | type] = ()) -> dict[str, Field]:
    """Key to field, for keys whose first part is in `sections`; all of `Settings` if it is empty.

    Args:
        sections: first parts of keys ("compare", "seeds"), and classes of commands' own sections.
    """
    classes = [x for x in sections if isinstance(x, type)]
    own = [f for cls in classes for f in walk(cls, f"{section_of(cls)}.")]
    known = {f.key: f for f in (*own, *map(_as_typed, walk(Settings)))}
    names = {*map(section_of, sections)}
    return {k: f for k, f in known.items() if not names or k.partition(".")[0] in names}


def _as_typed(field: Field) -> Field:
    """The field with the key that users type."""
    # `launcher=joblib`, as an option of a group is named; it is no group of Hydra's
    return replace(field, key="launcher") if field.key == LAUNCHER else field


def _field_of(key: str, known: Mapping[str, Field]) -> Field | None:
    """The field of a key, or the mapping that has it as an entry; None without one."""
    above = known.get(key.rpartition(".")[0])
    return known.get(key) or (above if above and isinstance(above.default, dict) else None)


def take(overrides: Sequence[str], *sections: str | type) -> tuple[Settings, list[str]]:
    """The settings among the overrides, and the other overrides.

    Args:
        overrides: `name=value`.
        sections: what the command takes, as in `fields`.

    Raises:
        UsageError: there is no such setting, or its value is not legal.
    """
    settings, rest = OmegaConf.structured(Settings), []
    OmegaConf.set_struct(settings, False)  # takes sections that the class does not name
    for cls in (x for x in sections if isinstance(x, type)):
        settings[section_of(cls)] = OmegaConf.structured(cls)
    known, names = fields(sections), {*map(section_of, sections)}
    given: dict[str, Override] = {}
    for text in overrides:
        name = text.lstrip("+~").partition("=")[0]  # a prefix of Hydra's grammar is no part of it
        if name.partition(".")[0] not in names:
            if near := did_you_mean(_called(name, known) if "=" in text else []):
                raise UsageError(f"'{text}': there is no field '{name}'{near}")
            rest.append(text)
            continue
        override = single(text, "a setting has one")
        key = override.key_or_group
        field = _field_of(key, known)
        if field is None:
            raise UsageError(
                f"'{text}': there is no field '{key}'{hint(key, known)}; legal: {', '.join(known)}"
            )
        field.set_in(settings, override.value(), f"'{text}'", _path(key))
        given[field.key] = override
    for key, override in given.items():
        _check_value(settings, known[key], override)
    return cast(Settings, OmegaConf.to_object(settings)), rest


def _called(name: str, known: Mapping[str, Field]) -> list[str]:
    """The settings that end in this name, and fields of a run that do; none for a field's key."""
    of_run = (*GROUPS, *leaves())
    own = [] if name in of_run else [k for k in known if k.rpartition(".")[2] == name]
    return own and [*own, *keys_called(name, of_run)]


def of_several_processes(overrides: Sequence[str], *keys: str) -> list[str]:
    """A warning for each of these settings that is given, where there is one process."""
    given = {text.partition("=")[0] for text in overrides}
    return [
        f"{key} has no effect: {key.partition('.')[0]}.world_size is 1"
        for key in keys
        if key in given
    ]


def _path(key: str) -> str:
    """The place in `Settings` of a key that users type."""
    return LAUNCHER if key == "launcher" else key


def _check_value(settings: Any, field: Field, override: Override) -> None:
    """Raise `UsageError` unless the value that a setting stands for exists and is legal."""
    try:
        value: Any = OmegaConf.select(settings, _path(field.key), throw_on_missing=True)
        if isinstance(value, ListConfig):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UsageError(
            f"'{override.input_line}': {field.key} is {field.legal} ({first_line(error)})"
        ) from None
    typed = override.value()  # shown as it was typed: -1, not -1.0
    field.check(typed if isinstance(typed, int | float) else value)


UNITS = {
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", start=1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", start=1)},
}


def parse_size(text: str, key: str) -> int:
    """The bytes in `text`, the value of the setting `key`.

    Raises:
        UsageError: it is not an amount of memory above zero.
    """
    by_name = {name.lower(): factor for name, factor in UNITS.items()}
    match = re.fullmatch(r"([0-9.eE+]+?)\s*([A-Za-z]*)", text.strip())
    factor = by_name.get(match[2].lower() or "b") if match else None
    try:
        size = float(match[1]) * factor if match and factor else math.nan
    except ValueError:
        size = math.nan
    if not 1 <= size < 2**63:  # sizes in PyTorch are int64; NaN is refused too
        raise UsageError(
            f"'{key}={text}': legal is an amount of memory above 0: a number and a unit, one of "
            f"{', '.join(UNITS)} (16GiB, 500MB)"
        )
    return int(size)
