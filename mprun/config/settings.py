"""The settings of commands (`compare.margin=0.01`, `seeds=5`), and the variants of a study.

Settings are not part of a run's configuration, so they do not change its variant.

The variants of a study are every mode, or every combination of the listed values.
`precision=fp32,bf16_mixed op_lists=none,hmp` are four combinations, and one is invalid: op lists
have no meaning in float32. Invalid combinations are left out and reported. A value that is invalid
in every combination is an error. A combination that differs from an earlier one only in fields
without effect is the same variant, so it is left out too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from hydra.core.override_parser.types import Override
from msgspec import Meta
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config.compose import compose, parse, single
from mprun.config.multirun import combinations
from mprun.config.recipe_file import named_file, with_absolute_paths
from mprun.config.reference import GROUPS, Field, options, quoted, walk
from mprun.config.validate import PATHS, check_name, without_inert
from mprun.errors import UsageError, first_line, hint
from mprun.records.policy_columns import Count, Legal, Positive

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
AUTO = "auto"
SEEDS = {"sweep": AUTO, "advise": AUTO, "double": 10}
"""Runs of each variant if `seeds` is null."""


@dataclass
class CompareSettings:
    """How runs are compared."""

    margin: Margin = MARGIN
    """Differences of accuracy (0.005 is half a point), or another fraction, that do not matter."""
    relative_margin: RelativeMargin = RELATIVE_MARGIN
    """For losses and all other metrics, as a share of the baseline's."""
    margins: dict[str, RelativeMargin] = field(default_factory=dict)
    """For quantities of the recipe, in place of relative_margin: compare.margin.NAME=0.01."""
    baseline: str | None = None
    """Label or hash of the variant the others are compared with; null for fp64, else fp32."""
    split: Annotated[str, Legal("auto", "test", "validation", "train")] = "auto"
    """Which samples the metric is computed on: auto, test, validation or train."""
    weights: Annotated[str, Legal("auto", "last", "averaged")] = "auto"
    """Which weights are judged: averaged (train.average_weights), last, auto (averaged if all runs
    have them)."""
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
    json: str | None = None
    """File for the decision on one variant, a line of JSON; -: standard output, and nothing else.
    Status 0: it may be kept, 3: not, 4: not settled."""
    keep: Annotated[str, Legal("auto", "unharmed", "better")] = "auto"
    """What must be shown to keep it: unharmed (equivalent or better) or better; auto: unharmed, in
    a stream better."""
    stream: str | None = None
    """File of a stream of decisions, whose common error is kept at 5 %; each adds a line."""


@dataclass
class StudySettings:
    """What every study may take."""

    max_time_s: Positive | None = None
    """Seconds for the study; trials that would exceed them are left out. null: no limit."""


@dataclass
class SweepSettings:
    """How many trials a sweep makes."""

    budget_min: Positive | None = None
    """Minutes for the sweep; trials that would exceed them are left out. null: no limit."""


@dataclass
class LauncherSettings:
    """Which processes run a study's trials."""

    name: Annotated[str, Legal("local", "joblib", "submitit")] = "local"
    """What runs the trials: local (this process), joblib (processes here) or submitit (jobs on
    Slurm; without Slurm, here). hydra.launcher.KEY=VALUE sets its fields."""
    processes: Count | None = None
    """Processes of joblib, or jobs of submitit (a job array on Slurm); null for 4."""

    def check(self) -> None:
        """Refuse processes without a launcher that starts some.

        Raises:
            UsageError: there are.
        """
        if self.processes is not None and self.name == "local":
            raise UsageError(
                f"launcher.processes={self.processes} has no effect with launcher=local; add "
                "launcher=joblib or launcher=submitit, or leave it out"
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
class Settings:
    """The settings of studies, and those that several commands take.

    A command's own section is a dataclass in its module of `mprun.inspect`: `own` returns it.
    """

    compare: CompareSettings = field(default_factory=CompareSettings)
    """How runs are compared."""
    study: StudySettings = field(default_factory=StudySettings)
    """What every study may take."""
    sweep: SweepSettings = field(default_factory=SweepSettings)
    """How many trials a sweep makes."""
    launcher: LauncherSettings = field(default_factory=LauncherSettings)
    """Which processes run a study's trials."""
    advise: AdviseSettings = field(default_factory=AdviseSettings)
    """How a mode is recommended."""
    seeds: Count | Annotated[str, Legal(AUTO)] | None = None
    """Runs of each variant, or auto: until its verdict is settled; null for auto, in double 10."""
    seeds_limit: Annotated[int, Meta(ge=2, le=1000)] = 20
    """The most runs of a variant with seeds=auto."""
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

    Classes among the sections are commands' own.
    """
    classes = [x for x in sections if isinstance(x, type)]
    own = [f for cls in classes for f in walk(cls, f"{section_of(cls)}.")]
    # `launcher=joblib`, as an option of a group is named; it is no group of Hydra's
    typed = (replace(f, key="launcher") if f.key == LAUNCHER else f for f in walk(Settings))
    known = {f.key: f for f in (*own, *typed)}
    names = {*map(section_of, sections)}
    return {k: f for k, f in known.items() if not names or k.partition(".")[0] in names}


def take(overrides: Sequence[str], *sections: str | type) -> tuple[Settings, list[str]]:
    """The settings of these sections, as in `fields`, among the overrides, and other overrides.

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
        text = re.sub(r"^compare\.margin\.", "compare.margins.", text)
        name = text.lstrip("+~").partition("=")[0]  # a prefix of Hydra's grammar is no part of it
        if name.partition(".")[0] not in names:
            rest.append(text)
            continue
        override = single(parse(text), "a setting has one")
        key = override.key_or_group
        above = known.get(key.rpartition(".")[0])  # a mapping, which has the key as an entry
        field = known.get(key) or (above if above and isinstance(above.default, dict) else None)
        if field is None:
            raise UsageError(
                f"{text!r}: there is no field '{key}'{hint(key, known)}; legal: {', '.join(known)}"
            )
        field.set_in(settings, override.value(), f"{text!r}", _path(key))
        given[field.key] = override
    for key, override in given.items():
        _check_value(settings, known[key], override)
    return cast(Settings, OmegaConf.to_object(settings)), rest


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
            f"{override.input_line!r}: {field.key} is {field.legal} ({first_line(error)})"
        ) from None
    typed = override.value()  # shown as it was typed: -1, not -1.0
    entry = replace(field, key=override.key_or_group)  # of a mapping its own key
    entry.check(typed if isinstance(typed, int | float) else value)


UNITS = {
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", start=1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", start=1)},
}


def parse_size(text: str, key: str) -> int:
    """The bytes in `text`, the value of the setting `key`.

    Raises:
        UsageError: it is not an amount of memory above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", text)
    size = float(match[1]) * UNITS[match[2]] if match else 0
    if not 1 <= size < 2**63:  # sizes in PyTorch are int64
        raise UsageError(
            f"'{key}={text}': legal is an amount of memory above 0: a number and a unit, one of "
            f"{', '.join(UNITS)} (16GiB, 500MB)"
        )
    return int(size)


# ---- studies -------------------------------------------------------------------------------------

RESUMED = "a resumed study keeps its plan"
BASELINE = "fp32"
NEUTRAL = ("none", "base")
"""Options that change nothing. They are not part of a name."""
EVERY = "all"
"""`precision=all` lists every mode."""
DECISION = ("compare.json", "compare.keep", "compare.stream")
SET_BY_STUDY = ("run.dir", "run.resume", "seed")


@dataclass(frozen=True)
class StudyRequest:
    """The arguments of a study."""

    command: str
    settings: Settings
    overrides: list[str]  # Of the runs; paths in them are absolute
    config_dir: Path | None
    folder: str | None  # `run.dir`
    resume: Path | None  # `run.resume`
    trust: bool = False  # `run.trust`
    hydra: tuple[str, ...] = ()  # Overrides of Hydra's launcher
    verbose: bool = False  # `--verbose`

    @property
    def is_auto(self) -> bool:
        """Whether each variant gets seeds until its verdict is settled."""
        return (self.settings.seeds or SEEDS[self.command]) == AUTO

    @property
    def seeds(self) -> Sequence[int]:
        """The seeds of a new study."""
        first, count = self.settings.first_seed, self.settings.seeds or SEEDS[self.command]
        return range(
            first, first + (count if isinstance(count, int) else self.settings.seeds_limit)
        )


def study_request(
    command: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    *sections: str,
    refused: Sequence[str] = (),
) -> StudyRequest:
    """Separate the settings of a study from the overrides of its runs.

    A command takes `compare`, `seeds`, `seeds_limit`, `first_seed` and its `sections`; it sets
    those that are `refused` itself.

    Raises:
        UsageError: a setting that is not legal, or one that a resumed study keeps.
    """
    settings, rest = take(overrides, "compare", "seeds", "seeds_limit", "first_seed", *sections)
    _refuse(overrides, refused, f"mprun {command} sets this itself")
    _refuse(overrides, DECISION, "a setting of mprun compare alone")
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
            raise UsageError(f"{of_runs[0]!r}: {RESUMED}; leave it out")
        if config_dir is not None:
            raise UsageError(f"--config-dir {config_dir}: {RESUMED}; leave it out")
        kept = ("seed", "seeds", "seeds_limit", "first_seed", "advise.max_steps", "run.dir")
        _refuse(overrides, kept, RESUMED)
    return StudyRequest(
        command,
        settings,
        of_runs,
        config_dir,
        folder=own.get("run.dir"),
        resume=None if resume is None else Path(resume),
        trust=own.get("run.trust", False),
        hydra=tuple(hydra),
    )


OWN = ("run.dir", "run.resume", "run.trust")
"""Fields that are about the study, and not about its runs."""


def _own_value(override: Override) -> bool | str | None:
    """The value of a field in `OWN`: whether to trust, the name of a folder, or None."""
    key, value = override.key_or_group, override.value()
    single(override, "legal is one")
    if key == "run.trust":
        if not isinstance(value, bool):
            raise UsageError(f"{override.input_line!r}: run.trust is true or false")
        return value
    if isinstance(value, dict | list):
        raise UsageError(f"{override.input_line!r}: legal is the name of one folder, or null")
    name = None if value is None else str(value)
    check_name(key, name, "a folder")
    return name


def _in_every_folder(override: Override) -> str:
    """The override with absolute paths: a study may be continued from another folder."""
    key, value = override.key_or_group, override.value()
    if key in PATHS and isinstance(value, str):
        return f"{key}={quoted(Path(value).absolute())}"
    return with_absolute_paths(override) if key == "recipe" else str(override.input_line)


def _refuse(overrides: Sequence[str], keys: Sequence[str], reason: str) -> None:
    for text in overrides:
        if text.lstrip("+").partition("=")[0] in keys:
            raise UsageError(f"{text!r}: {reason}; leave it out")


@dataclass(frozen=True)
class Variants:
    """The variants of a study."""

    overrides: dict[str, tuple[str, ...]]  # By name
    # By name: why a combination is invalid, or which variant it repeats
    left_out: dict[str, str] = field(default_factory=dict)


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
    """The variants of a study with these overrides; without `precision`, every mode but
    fp64 is included.

    Raises:
        UsageError: an override is invalid in every combination, or in the only one.
    """
    parsed = [parse(text) for text in with_every_mode(overrides, config_dir)]
    for override in parsed:
        if override.key_or_group in SET_BY_STUDY:
            raise UsageError(
                f"{override.input_line!r}: a study sets seeds and folders itself; "
                "seeds=5 runs seeds 0 to 4"
            )
    has_precision = any(o.key_or_group == "precision" for o in parsed)
    if not has_precision:
        # float64 answers another question, whether float32 is enough, at twice the price
        every = [name for name in modes(config_dir) if name != "fp64"]
        parsed = [parse(f"precision={','.join(every)}"), *parsed]
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
