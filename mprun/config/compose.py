"""From command-line overrides to a checked `Config`, or one clear line about what is wrong.

Hydra's own messages name the override but neither the legal values nor the nearest match, and
some mistakes reach the user as tracebacks of its internals. So each override is looked at first
(does the field exist, is the group's option there?), Hydra composes, and what it still refuses is
put in the words of the schema.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config.reference import GROUPS, leaves, sections
from mprun.config.schema import Config
from mprun.config.validate import check, without_effect
from mprun.errors import UsageError, hint

CONFIG_NAME = "config"
SCHEMA_NAME = "config_schema"


@dataclass(frozen=True)
class Composed:
    """A configuration that passed every check that needs no torch."""

    config: Config
    """The typed configuration."""
    resolved: dict[str, Any]
    """The same as plain values, as `config.yaml` keeps it."""
    given: tuple[str, ...]
    """Keys the user set on the command line."""
    warnings: tuple[str, ...]
    """Fields the user set that have no effect in this configuration."""


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> Composed:
    """Compose and check a configuration.

    Args:
        overrides: Hydra overrides, `name=value`.
        config_dir: a further folder of configs (a user's own recipes), or None.

    Raises:
        UsageError: anything wrong with the overrides or the files, in one line.
    """
    ConfigStore.instance().store(name=SCHEMA_NAME, node=Config)
    extra = [] if config_dir is None else [f"hydra.searchpath=[{_search_path(config_dir)}]"]
    with initialize_config_module("mprun.conf", version_base="1.3"):
        parsed = [_parse(text) for text in overrides]
        for override in parsed:
            _check_override(override, config_dir)
        raw = _compose([*overrides, *extra], parsed)
    config, resolved = _to_config(raw)
    given = tuple(o.key_or_group for o in parsed)
    check(config)
    return Composed(config, resolved, given, tuple(without_effect(config, given)))


def _search_path(folder: Path) -> str:
    if not folder.is_dir():
        raise UsageError(f"--config-dir {folder}: no such folder")
    return f"'file://{folder.resolve()}'"


def _parse(text: str) -> Override:
    name = text.split("=", 1)[0]
    if "=" not in text and not text.startswith("~"):
        raise UsageError(
            f"'{text}' is neither a command nor an override; write name=value, "
            f"see mprun --help{hint(name, [*GROUPS, *leaves()])}"
        )
    try:
        parsed: Override = OverridesParser.create().parse_override(text)
    except OverrideParseException as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"'{text}' cannot be read ({reason}); write name=value, with the value in single "
            "quotes where it holds spaces, commas or brackets"
        ) from None
    if not parsed.key_or_group:
        raise UsageError(f"'{text}' has no name before the '='; write name=value")
    return parsed


def _check_override(override: Override, config_dir: Path | None) -> None:
    text, key = override.input_line, override.key_or_group
    if key.startswith(("hydra.", "hydra/")):
        return
    if override.is_delete():
        raise UsageError(f"'{text}': nothing can be deleted; set a field to null, a group to none")
    if override.package is not None:
        raise UsageError(f"'{text}': a group has one place; write {key}=...")
    if override.is_sweep_override():
        raise UsageError(f"'{text}' lists several values: a sweep, which needs -m")
    if key in GROUPS:
        _check_option(override, key, config_dir)
    elif key in sections():
        raise UsageError(f"'{text}': {key} holds fields; set one of them: {_below(key)}")
    elif key not in leaves() and not key.startswith("recipe.model."):
        known = [*GROUPS, *leaves()]
        raise UsageError(f"'{text}': there is no field '{key}'{_or_legal(key, known)}")


def _or_legal(key: str, known: list[str]) -> str:
    """The nearest known key; else, where the section exists, its fields; else where to look."""
    near = hint(key, known)
    section = key.rpartition(".")[0]
    if near:
        return near
    return f"; legal: {_below(section)}" if section in sections() else "; see mprun --help"


def _below(section: str) -> str:
    return ", ".join(k for k in leaves() if k.startswith(f"{section}."))


def _check_option(override: Override, group: str, config_dir: Path | None) -> None:
    value = override.value()
    known = GlobalHydra.instance().config_loader().get_group_options(group, ObjectType.CONFIG)
    if config_dir is not None and (config_dir / group).is_dir():
        known = sorted({*known, *(p.stem for p in (config_dir / group).glob("*.yaml"))})
    if not isinstance(value, str) or value not in known:
        near = hint(str(value), known)
        raise UsageError(f"'{override.input_line}': {group} is one of {', '.join(known)}{near}")


def _compose(overrides: list[str], parsed: list[Override]) -> DictConfig:
    try:
        return hydra_compose(CONFIG_NAME, overrides=overrides)
    except (HydraException, OmegaConfBaseException, OSError, ValueError, TypeError) as error:
        raise UsageError(_explain(error, parsed)) from None


def _explain(error: Exception, parsed: list[Override]) -> str:
    """Hydra's refusal in one line, with the field's legal values where a field is named."""
    text = str(error)
    for override in parsed:
        if text.startswith(f"Error merging override {override.input_line}"):
            found = leaves().get(override.key_or_group)
            if found is not None:
                near = hint(str(override.value()), found.choices)
                return f"'{override.input_line}': {found.key} is {found.legal}{near}"
    cause = error.__cause__
    return _one_line(f"{text} ({cause})" if cause is not None else text)


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", "; ", text.strip())


def _to_config(raw: DictConfig) -> tuple[Config, dict[str, Any]]:
    try:
        resolved = OmegaConf.to_container(
            raw, resolve=True, throw_on_missing=True, enum_to_str=True
        )
        config = OmegaConf.to_object(raw)
    except OmegaConfBaseException as error:
        raise UsageError(_one_line(str(error))) from None
    return cast(Config, config), cast("dict[str, Any]", resolved)
