"""From command-line overrides to a checked `Config`, or one clear line about what is wrong.

Hydra's messages name the override, but neither the legal values nor the nearest match, and some
mistakes end in a traceback of its internals. So each override is checked first (does the field, or
the option of the group, exist?). Then Hydra composes, and its remaining errors get the texts of the
schema.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from mprun.config.recipe_file import named_file, option_of
from mprun.config.reference import GROUPS, as_text, keys_called, leaves, options, quoted, sections
from mprun.config.schema import Config
from mprun.config.validate import check, without_effect
from mprun.errors import UsageError, as_usage_error, did_you_mean, first_line, hint, nearest
from mprun.records.files import launch_of, refuse_links
from mprun.records.layer_values import layer_values
from mprun.records.mode_names import ALIASES, mode_hint
from mprun.records.op_list_files import KINDS, read_list
from mprun.records.reader import NotYamlError, read_yaml
from mprun.records.run_folder import ENTRIES, has_begun

CONFIG_NAME = "config"
SCHEMA_NAME = "config_schema"

OPEN_MAPPINGS = ("recipe.model.", "precision.layers.", "logger.tags.")
"""Mappings whose keys are the user's: parameters of a recipe or class, names of modules, tags."""

EPOCHS = 3
"""Passes over the data of a recipe in a file, where nothing limits the run."""

NOISE = ("full_key:", "reference_type=", "object_type=", "Config search path", "provider=")
"""Lines in messages of Hydra and OmegaConf that start like this do not help a user."""


@dataclass(frozen=True)
class Composed:
    """A configuration that passed every check that needs no torch."""

    config: Config
    resolved: dict[str, Any]  # The same as plain values, as `config.yaml` keeps it
    given: tuple[str, ...]  # Keys the user set on the command line
    warnings: tuple[str, ...]  # Fields the user set that have no effect in this configuration


RAISED = (
    *(HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError),
    *(LookupError, AttributeError, AssertionError, RecursionError),
)
"""What Hydra raises for wrong overrides, and for files whose content it does not expect."""

SPELLINGS = {
    "debug.fp_exceptions=true": "debug.fp_exceptions=log",
    "debug.fp_exceptions=false": "debug.fp_exceptions=off",
}
"""Switch-like spellings of overrides, and their meaning."""


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> Composed:
    """Compose and check a configuration from Hydra overrides, `name=value`.

    `config_dir` is a further folder of configs: the user's recipes. A `UsageError` says in one line
    what is wrong with the overrides or the files.
    """
    extra = search_path(config_dir)
    with hydra_here():
        parsed = [checked(text, config_dir) for text in overrides]
        resume = next((o.value() for o in parsed if o.key_or_group == "run.resume"), None)
        if resume is None:
            return to_composed(_compose([*map(for_hydra, parsed), *extra], parsed), parsed)
        raw = resumed(str(resume), parsed)
    try:
        return to_composed(raw, parsed, new=False)
    except UsageError as error:
        raise UsageError(f"run.resume={resume}: {error}") from None


@contextmanager
def hydra_here() -> Iterator[Any]:
    """Inside, Hydra composes from mprun's files; a process has one Hydra, which this is."""
    _register_schema()
    # the version whose behaviour conf/ is written for; Hydra warns without one
    with initialize_config_module("mprun.conf", version_base="1.3"):
        yield GlobalHydra.instance().hydra


@cache
def _register_schema() -> None:
    """Tell Hydra the types of the configuration, and further names of modes."""
    store = ConfigStore.instance()
    store.store(name=SCHEMA_NAME, node=Config)
    for name, mode in ALIASES.items():  # for `override /precision:` in a preset
        store.store(group="precision", name=name, node={"defaults": [mode]})


def to_composed(raw: DictConfig, parsed: Sequence[Override] = (), new: bool = True) -> Composed:
    """Hydra's result, typed and checked.

    `new` reads op-list files; a resumed run has the names in them in its configuration.
    """
    _limit_length(raw)
    _take_launch(raw, parsed)
    try:
        resolved: Any = OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)
        config = cast(Config, OmegaConf.to_object(raw))
    except OmegaConfBaseException as error:
        raise UsageError(_explain(error, parsed)) from None
    given = tuple(o.key_or_group for o in parsed)
    with as_usage_error("precision.layers."):
        config.precision.layers = layer_values(config.precision.layers)
    # in one spelling, so that two names of a value are one variant
    resolved["precision"]["layers"] = dict(config.precision.layers)
    check(config)
    if new:
        _read_op_lists(config, resolved)
    return Composed(config, resolved, given, tuple(without_effect(config, given)))


def _limit_length(raw: DictConfig) -> None:
    """Train a recipe that is a file for `EPOCHS` where nothing else limits the run."""
    with suppress(OmegaConfBaseException):  # reported where the values are read
        train = raw.train
        if raw.recipe.file is not None and not any(
            (train.epochs, train.max_steps, train.max_time_s)
        ):
            train.epochs = EPOCHS


def _take_launch(raw: DictConfig, parsed: Sequence[Override]) -> None:
    """Set the number of processes to what torchrun started, in a resumed run too."""
    launch = launch_of()
    for override in parsed:
        if override.key_or_group == "parallel.world_size" and override.value() != launch.world_size:
            raise UsageError(
                f"{override.input_line!r}: torchrun decides it, and the processes here are "
                f"{launch.world_size}; start them with torchrun --nproc-per-node=N -m mprun ..."
            )
    with suppress(OmegaConfBaseException):  # reported where the values are read
        raw.parallel.world_size = launch.world_size
        if launch.world_size > 1 and raw.parallel.name == "none":
            raise UsageError(
                f"torchrun started {launch.world_size} processes, and parallel=none trains in one; "
                "legal: parallel=ddp (each process holds the whole model) or parallel=fsdp2 (each "
                "holds a shard)"
            )


def _read_op_lists(config: Config, resolved: dict[str, Any]) -> None:
    """Replace the shipped op lists by the user's files, on every device."""
    for kind in KINDS:
        path = getattr(config.op_lists, f"{kind}_file")
        if path is None:
            continue
        with as_usage_error(f"op_lists.{kind}_file: "):
            names = [entry.text for entry in read_list(Path(path), kind)]
        for key, value in ((kind, names), (f"cuda_{kind}", None)):
            setattr(config.op_lists, key, value)
            resolved["op_lists"][key] = value


def search_path(folder: Path | None) -> list[str]:
    """The override that adds a folder of configs, or none."""
    if folder is None:
        return []
    try:
        next(folder.iterdir(), None)  # Hydra only warns of a folder that is not there
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--config-dir {folder} cannot be read: {reason}") from None
    for name, mode in ALIASES.items():
        if (path := folder / "precision" / f"{name}.yaml").exists():
            raise UsageError(
                f"{path}: precision={name} is mprun's {mode}; give your mode another name"
            )
    return [f"hydra.searchpath=[{quoted(f'file://{folder.resolve()}')}]"]


def parse(text: str) -> Override:
    """An override, parsed; raises `UsageError` if it is not valid."""
    name = text.split("=", 1)[0]
    if "=" not in text and not text.startswith("~"):  # `~key` deletes in Hydra's grammar
        near = nearest(name, [*GROUPS, *leaves()])
        if name.endswith(".py") or name in options("recipe"):
            near = f"recipe={name}"
        meant = f"; did you mean '{near if '=' in near else f'{near}=...'}'?" if near else ""
        raise UsageError(
            f"{text!r} is neither a command nor an override; write name=value, "
            f"see mprun --help{meant}"
        )
    try:
        parsed: Override = OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError) as error:
        reason = one_line(error).partition(" expecting ")[0]  # behind it are tokens of a grammar
        raise UsageError(
            f"{text!r} cannot be read ({reason}); write name=value, a value with other "
            "characters than letters, digits and -+._/ in quotes that the shell leaves: "
            "\"name='value'\""
        ) from None
    if not parsed.key_or_group:
        raise UsageError(f"{text!r} has no name before the '='; write name=value")
    same = SPELLINGS.get(text.lower())
    if parsed.key_or_group == "precision" and not (parsed.is_sweep_override() or parsed.package):
        mode = ALIASES.get(str(parsed.value()))  # another name of it
        same = mode and f"precision={mode}"
    return parse(same) if same else parsed


def single(override: Override, else_: str = "a sweep, which needs -m") -> Override:
    """An override with one value, else a `UsageError`; `else_` is what a list would be."""
    text, key = str(override.input_line), override.key_or_group  # in mprun's spelling
    if override.is_delete():
        raise UsageError(f"{text!r}: nothing can be deleted; leave {key} out for its default")
    if override.package is not None:
        raise UsageError(f"{text!r}: {key} cannot be moved to a package; write {key}=...")
    if override.is_sweep_override():
        raise UsageError(f"{text!r} lists several values: {else_}")
    return override


def checked(text: str, config_dir: Path | None) -> Override:
    """An override, parsed, that names a field or an option of a group, else a `UsageError`."""
    override = parse(text)
    text, key = str(override.input_line), override.key_or_group
    if key.startswith(("hydra.", "hydra/")):
        raise UsageError(
            f"{text!r}: of Hydra's own settings those of a launcher are legal, with -m and in "
            "studies; run.dir=FOLDER names the folder"
        )
    single(override)
    if key in GROUPS:
        _check_option(override, key, config_dir)
    elif key == "recipe.file":
        raise UsageError(f"{text!r}: write recipe=path/to/my.py")
    elif key in sections():
        raise UsageError(f"{text!r}: {key} has fields; set one of them: {_below(key)}")
    elif _is_unknown(key):
        raise UsageError(f"{text!r}: there is no field '{key}'{_or_legal(key)}")
    return override


def _is_unknown(key: str) -> bool:
    """Whether nothing has this name; the class of a recipe checks its own parameters."""
    return key not in (*GROUPS, *sections(), *leaves()) and not key.startswith(OPEN_MAPPINGS)


def _or_legal(key: str) -> str:
    """The keys that are meant, else the fields of the section, else the help."""
    if key in GONE:
        return "; optimizer(model) of a recipe makes any optimizer"
    known = (*GROUPS, *leaves(), "seeds_limit", "first_seed")  # the last two of studies
    near = did_you_mean(keys_called(key, known)) or hint(key, known)
    section = key.rpartition(".")[0]
    if near:
        return near
    return f"; legal: {_below(section)}" if section in sections() else "; see mprun --help"


def _below(section: str) -> str:
    return ", ".join(k for k in leaves() if k.startswith(f"{section}."))


def for_hydra(override: Override) -> str:
    """The override without `+`; a recipe's file becomes the option that has its values."""
    text = str(override.input_line).lstrip("+")  # which has no meaning, because every field exists
    if override.key_or_group == "recipe" and not override.is_sweep_override():
        option = option_of(str(override.value()))
        return text if option == str(override.value()) else f"recipe={option}"
    # `++` makes Hydra add a key to a mapping with the user's keys
    add = "++" if f"{override.key_or_group}.".startswith(OPEN_MAPPINGS) else ""
    return add + text


def _check_option(override: Override, group: str, config_dir: Path | None) -> None:
    value = override.value()
    if group == "recipe" and named_file(value) is not None:
        return
    known = list(options(group))
    if config_dir is not None and (config_dir / group).is_dir():
        known = sorted({*known, *(p.stem for p in (config_dir / group).glob("*.yaml"))})
    if not isinstance(value, str) or value not in known:
        near = hint(str(value), known)
        if group == "precision":  # a word such as `bf16` may mean several modes
            near = mode_hint(str(value), known)
        with suppress(OSError, ValueError):  # the value may be no name of a file at all
            if group == "recipe" and Path(f"{value}.py").is_file():
                near = f", or the path of a file; did you mean 'recipe={value}.py'?"
        raise UsageError(f"{override.input_line!r}: {group} is one of {', '.join(known)}{near}")
    if config_dir is not None and value not in options(group):
        path = config_dir / group / f"{value}.yaml"
        # before Hydra, which reads it without limits, and reports mistakes in terms of its own
        try:
            read_yaml(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror})") from None
        except NotYamlError as error:
            raise UsageError(f"{path} is not a valid configuration ({error})") from None


def _group(override: str) -> str:
    return override.partition("=")[0]


def _compose(overrides: list[str], parsed: list[Override]) -> DictConfig:
    """Hydra's composition, whose choice of options is made once per process.

    Hydra chooses an option of each group, merges their files (0.1 s), then sets the fields in turn.
    A study composes a configuration per trial, and its trials differ in few choices.
    """
    choices = [text for text in overrides if _group(text) in GROUPS]
    fields = [o for o in parsed if o.key_or_group not in GROUPS]
    if len(choices) + len(fields) == len(overrides):  # no folder of files, which may change
        with suppress(*RAISED):  # a mistake: Hydra composes below, and reports it
            # sorted: the same options in another order are one entry of the cache
            config = copy.deepcopy(_chosen(tuple(sorted(choices, key=_group))))
            for field in fields:
                is_new = field.key_or_group.startswith(OPEN_MAPPINGS)
                OmegaConf.update(config, field.key_or_group, field.value(), force_add=is_new)
            return config
    try:
        return hydra_compose(CONFIG_NAME, overrides=overrides)
    except RAISED as error:
        raise UsageError(_explain(error, parsed)) from None


@cache
def _chosen(choices: tuple[str, ...]) -> DictConfig:
    """The shipped files of these options, merged; not to be changed."""
    return hydra_compose(CONFIG_NAME, overrides=list(choices))


def _explain(error: Exception, parsed: Sequence[Override]) -> str:
    """An error of Hydra in one line, with the legal values if it names a field."""
    cause = error.__cause__ or error
    named = re.search(r"full_key: (\S+)", str(cause))
    key = named[1] if named else ""
    field = leaves().get(key)
    if field is None and key.startswith(OPEN_MAPPINGS):  # an entry of a mapping
        key = next(prefix[:-1] for prefix in OPEN_MAPPINGS if key.startswith(prefix))
        field = leaves()[key]
    if field is None:
        given = " ".join(str(o.input_line) for o in parsed)
        legal = _or_legal(key) if key and _is_unknown(key) else ""
        return f"cannot compose {given!r}: {one_line(error)}{legal}"
    setting = [o for o in parsed if o.key_or_group.startswith(field.key)]
    # Hydra's text ends in the override that it refuses; without one, the last that sets the field
    refused = [o for o in setting if str(error).endswith(for_hydra(o))]
    override = next(iter([*refused, *reversed(setting)]), None)
    received = f"{override.input_line!r}: " if override else ""
    near = hint(str(override.value()), field.choices) if override else ""
    reason = "" if refused else f" ({one_line(cause)})"
    return f"{received}{key} is {field.legal}{near}{reason}"


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(x.rstrip(".:;") for x in lines if x and not x.startswith(NOISE))


# ---- the configuration of a resumed run ----------------------------------------------------------

# A resumed run gives the same bits as an uninterrupted one, so it keeps every field that affects
# them. Fields that only affect its end, its output or the location of files may change.
MAY_CHANGE = (
    *("train.epochs", "train.max_steps", "train.max_time_s", "train.log_every"),
    *("train.checkpoint_every_steps", "train.validations", "train.average_weights", "parallel"),
    *("data.root", "debug.fp_exceptions", "debug.halt_after", "logger.uri", "run.trust"),
)
LENGTH = ("train.epochs", "train.max_steps")  # What a learning-rate schedule is planned for
# Fields of earlier versions, with the value that changes nothing; another value is refused
GONE: dict[str, Any] = {
    "train.optimizer.target": None,
    "train.optimizer.args": {},
    "debug.guard": "off",
    "debug.guard_underflow": None,
    "debug.guard_error": None,
}


def resumed(folder: str, parsed: Sequence[Override]) -> DictConfig:
    """The configuration of the run in `folder`, with the overrides that are allowed.

    The folder may be another person's. Raises `UsageError` where there is no run, or an override
    would change its bits.
    """
    path = Path(folder) / "config.yaml"
    refuse_links(Path(folder), ENTRIES)
    try:
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise ValueError("it is not a mapping")
        # as text: it was resolved when it was written, so `${oc.env:...}` in it is not mprun's
        config = OmegaConf.merge(OmegaConf.structured(Config), _of_now(as_text(content)))
        assert isinstance(config, DictConfig)
        config.run.trust = False  # the folder cannot vouch for itself: the command line can
        for override in parsed:
            _change(config, override)
        uri, given = config.logger.uri, [override.key_or_group for override in parsed]
        config.run.dir = config.run.resume = as_text(folder)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and has_begun(Path(folder)):
            again = shlex.quote(f"run.dir={folder}")
            raise UsageError(
                f"run.resume={folder}: the run ended before anything was recorded, so there is "
                "nothing to resume; begin it again with its own overrides: mprun OVERRIDES "
                f"{again}"
            ) from None
        raise UsageError(
            f"run.resume={folder}: {path} cannot be read ({error.strerror}); "
            "write the folder of a run"
        ) from None
    except (OmegaConfBaseException, NotYamlError, ValueError, TypeError, RecursionError) as error:
        key = getattr(error, "full_key", None)
        reason = f"{key}: {first_line(error)}" if key else first_line(error)
        raise UsageError(
            f"run.resume={folder}: {path} is not a valid configuration ({reason})"
        ) from None
    # nothing is sent to an address from the folder, and no file that it names is changed
    if uri is not None and "logger.uri" not in given and not config.run.trust:
        raise UsageError(
            f"run.resume={folder}: the run's logger.uri={uri} is where its figures go; if the "
            "folder is yours, add run.trust=true, else logger.uri=null or an address of yours"
        )
    return config


def _of_now(content: Any) -> DictConfig:
    """A run's configuration without the fields that are gone and change nothing."""
    config: DictConfig = OmegaConf.create(content)
    for key, default in GONE.items():
        section, _, name = key.rpartition(".")
        row = OmegaConf.select(config, section)
        if isinstance(row, DictConfig) and name in row and row[name] == default:
            del row[name]
    return config


def _change(config: DictConfig, override: Override) -> None:
    """Apply an override to the configuration of a resumed run."""
    key, value = override.key_or_group, override.value()
    if key == "run.resume":
        return
    if key not in MAY_CHANGE:
        if not _is_same(config, key, value):
            raise UsageError(
                f"{override.input_line!r}: a resumed run keeps its configuration; "
                f"legal changes: {', '.join(MAY_CHANGE)}{hint(key, MAY_CHANGE)}"
            )
        return
    key = "parallel.name" if key == "parallel" else key
    saved, scheduler = OmegaConf.select(config, key), config.train.scheduler
    if key in LENGTH and scheduler != "none" and value != saved:
        raise UsageError(
            f"{key}={value}: the run's train.scheduler={scheduler} was planned for {key}={saved}, "
            "which a resumed run keeps"
        )
    # dropping steps changes the run's bits; reporting exceptions does not
    if key == "debug.fp_exceptions" and value != saved and "skip" in (value, saved):
        raise UsageError(
            f"{key}={value}: skip decides what is computed, and the run has {saved}; "
            "legal changes: between off, log and halt"
        )
    leaves()[key].set_in(config, value, f"{override.input_line!r}")


def _is_same(config: DictConfig, key: str, value: Any) -> bool:
    """Whether the override repeats the run's value."""
    if key == "recipe" and (file := named_file(value)) is not None:
        return (config.recipe.file, config.recipe.target) == (str(file.path), file.kind)
    if key in GROUPS and "name" not in config[key]:  # the option is identified by its fields
        option = hydra_compose(CONFIG_NAME, overrides=[f"{key}={value}"])
        return bool(option[key] == config[key])
    saved = OmegaConf.select(config, f"{key}.name" if key in GROUPS else key)
    return bool(saved == value) or str(saved) == str(value)  # `precision.name=123` is a number
