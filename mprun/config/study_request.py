"""A study, which sweep, advise and double run: its parsed arguments, and its variants.

The variants are every mode, or every combination of the listed values.
`precision=fp32,bf16_mixed op_lists=none,hmp` are four combinations, and one is invalid: op lists
have no meaning in float32. Invalid combinations are left out and reported. A value that is invalid
in every combination is an error. A combination that differs from an earlier one only in fields
without effect is the same variant, so it is left out too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from mprun.config.compose import compose, parse
from mprun.config.multirun import combinations
from mprun.config.quoting import quoted
from mprun.config.recipe_file import named_file, with_absolute_paths
from mprun.config.reference import GROUPS, leaves, options
from mprun.config.settings import SEEDS, Settings, take
from mprun.config.validate import PATHS, check_name, without_inert
from mprun.errors import UsageError

RESUMED = "a resumed study keeps its plan"
BASELINE = "fp32"
NEUTRAL = ("none", "base")
"""Options that change nothing. They are not part of a name."""
EVERY = "all"
"""`precision=all` lists every mode."""
SET_BY_STUDY = ("run.dir", "run.resume", "seed")


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
    listed_seeds: tuple[int, ...] = ()
    """Those of `seed=0,1,2`, which `seeds` and `first_seed` otherwise count."""
    verbose: bool = False
    """`--verbose`."""

    @property
    def seeds(self) -> Sequence[int]:
        """The seeds of a new study."""
        if self.listed_seeds:
            return self.listed_seeds
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
    listed = _listing_seeds(overrides)
    counted = [text for text in overrides if text != listed]
    settings, rest = take(counted, "compare", "seeds", "first_seed", *sections)
    if listed is not None:
        _refuse(counted, ("seed", "seeds", "first_seed"), f"'{listed}' lists the seeds")
    _refuse(overrides, refused, f"mprun {command} sets this itself")
    own: dict[str, Any] = {}
    of_runs, hydra = [], []
    for override in map(parse, rest):
        key = override.key_or_group
        if key in OWN:
            own[key] = _own_value(override)
        elif key.startswith(("hydra/launcher", "hydra.launcher.")) and "launcher" in sections:
            hydra.append(str(override.input_line))
        else:
            of_runs.append(_in_every_folder(override))
    resume = own.get("run.resume")
    if resume is not None:
        if of_runs:
            raise UsageError(f"'{of_runs[0]}': {RESUMED}; leave it out")
        if config_dir is not None:
            raise UsageError(f"--config-dir {config_dir}: {RESUMED}; leave it out")
        _refuse(overrides, ("seed", "seeds", "first_seed", "advise.max_steps", "run.dir"), RESUMED)
    return StudyRequest(
        command,
        settings,
        of_runs,
        config_dir,
        folder=own.get("run.dir"),
        resume=None if resume is None else Path(resume),
        trust=own.get("run.trust", False),
        hydra=tuple(hydra),
        listed_seeds=() if listed is None else _seeds(listed),
    )


OWN = ("run.dir", "run.resume", "run.trust")
"""Fields that are about the study, and not about its runs."""


def _own_value(override: Override) -> bool | str | None:
    """The value of a field in `OWN`: whether to trust, the name of a folder, or None."""
    key, value = override.key_or_group, override.value()
    if key == "run.trust":
        if not isinstance(value, bool):
            raise UsageError(f"'{override.input_line}': run.trust is true or false")
        return value
    if override.is_delete() or override.is_sweep_override() or isinstance(value, dict | list):
        raise UsageError(f"'{override.input_line}': legal is the name of one folder, or null")
    name = None if value is None else str(value)
    check_name(key, name, "a folder")
    return name


def _in_every_folder(override: Override) -> str:
    """The override with absolute paths: a study may be continued from another folder."""
    key, value = override.key_or_group, override.value()
    if key in PATHS and isinstance(value, str):
        return f"{key}={quoted(Path(value).absolute())}"
    return with_absolute_paths(override) if key == "recipe" else str(override.input_line)


def _listing_seeds(overrides: Sequence[str]) -> str | None:
    """The override that lists seeds: `seed=0,1,2`, or the same with `seeds`; None without one."""
    for text in overrides:
        if text.partition("=")[0] in ("seed", "seeds"):
            override = parse(text)
            if override.is_sweep_override() or isinstance(override.value(), list):
                return text
    return None


def _seeds(text: str) -> tuple[int, ...]:
    """The seeds that an override lists.

    Raises:
        UsageError: one is no seed, or there is none.
    """
    override, field = parse(text), leaves()["seed"]
    value = override.value()
    if not isinstance(value, list):
        value = [parse(one).value() for one in chain(*combinations([override]))]
    if not value:
        raise UsageError(f"'{text}' lists no seed; legal: seeds=0,1,2, or seeds=3 for these")
    for seed in value:
        if type(seed) is not int:  # true and false would be 1 and 0
            raise UsageError(f"'{text}': a seed is {field.legal}, not {str(seed)!r}")
        field.check(seed)
    return tuple(dict.fromkeys(value))  # a seed that is listed twice is one run


def _refuse(overrides: Sequence[str], keys: Sequence[str], reason: str) -> None:
    for text in overrides:
        if text.lstrip("+").partition("=")[0] in keys:
            raise UsageError(f"'{text}': {reason}; leave it out")


@dataclass(frozen=True)
class Variants:
    """The variants of a study."""

    overrides: dict[str, tuple[str, ...]]
    """By name."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The reason why a combination is invalid, or which variant it repeats; by name."""


def modes(config_dir: Path | None = None) -> list[str]:
    """Every precision mode, those in `config_dir` included, float32 first."""
    own = () if config_dir is None else (config_dir / "precision").glob("*.yaml")
    names = {*options("precision"), *(path.stem for path in own)}
    return sorted(names, key=lambda name: (name != BASELINE, name))


def with_every_mode(overrides: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """The overrides with `precision=all` as a list of every mode, unless a mode has that name."""
    names = modes(config_dir)
    listed = text = f"precision={EVERY}"
    if EVERY not in names:
        listed = f"precision={','.join(names)}"
    return [listed if override == text else override for override in overrides]


def variants(overrides: Sequence[str], config_dir: Path | None = None) -> Variants:
    """The variants of a study with these overrides; without `precision`, every mode is included.

    Raises:
        UsageError: an override is invalid in every combination, or in the only one.
    """
    parsed = [parse(text) for text in with_every_mode(overrides, config_dir)]
    for override in parsed:
        if override.key_or_group in SET_BY_STUDY:
            raise UsageError(
                f"'{override.input_line}': a study sets seeds and folders itself; "
                "seeds=5 runs seeds 0 to 4"
            )
    has_precision = any(o.key_or_group == "precision" for o in parsed)
    if not has_precision:
        parsed = [parse(f"precision={','.join(modes(config_dir))}"), *parsed]
    varied = [i for i, o in enumerate(parsed) if o.is_sweep_override()]
    varied = varied or [i for i, o in enumerate(parsed) if o.key_or_group == "precision"]
    valid: dict[str, tuple[str, ...]] = {}
    left_out: dict[str, str] = {}
    errors: list[tuple[tuple[str, ...], UsageError]] = []
    names: dict[str, str] = {}  # configuration without inert fields, to the first variant's name
    accepted: set[str] = set()  # overrides that are valid in some combination
    for combination in combinations(parsed):
        name = _name(combination, varied)
        try:
            composed = compose([*combination, "seed=0"], config_dir)  # a study's own are no variant
        except UsageError as error:
            errors.append((combination, error))
            left_out[name] = str(error)
            continue
        accepted.update(combination)
        effect = json.dumps(without_inert(composed.config, composed.resolved), sort_keys=True)
        if (first := names.setdefault(effect, name)) == name:
            valid[name] = combination
        else:
            left_out[name] = "; ".join([f"the same as {first}", *composed.warnings])
    # an override that is valid in no combination is a mistake, not a combination without a meaning
    for combination, refusal in errors:
        checked = combination if has_precision else combination[1:]
        if not accepted.issuperset(checked):
            raise refusal
    return Variants(valid, left_out)


def _name(combination: Sequence[str], varied: Sequence[int]) -> str:
    """A combination's name: what varies, groups by their option alone."""
    parts = []
    for i in varied:
        key, _, value = combination[i].partition("=")
        if key in GROUPS and value in NEUTRAL:
            continue
        value = _recipe_name(value) if key == "recipe" else value
        parts.append(value if key in GROUPS else f"{key.lstrip('+')}={value}")
    precision = [x.partition("=")[2] for x in combination if x.startswith("precision=")]
    return "+".join(parts) or precision[-1]


def _recipe_name(value: str) -> str:
    """The name of a recipe, the stem of one that is a file."""
    file = named_file(value.strip("'\""))
    return value if file is None else file.name + (f":{file.kind}" if file.kind else "")
