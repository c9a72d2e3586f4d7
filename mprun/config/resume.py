"""The configuration of a resumed run: its own, with the few fields that may change.

A resumed run gives the same bits as an uninterrupted one, so it keeps every field that affects
them. Fields that only affect its end, its output or the location of files may change.

The folder may be another person's.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config.quoting import as_text
from mprun.config.recipe_file import named_file
from mprun.config.reference import GROUPS, leaves
from mprun.config.schema import Config
from mprun.errors import UsageError, first_line, hint
from mprun.records.files import refuse_links
from mprun.records.reader import NotYamlError, read_yaml
from mprun.records.run_folder import ENTRIES, has_begun

MAY_CHANGE = (
    "train.epochs",
    "train.max_steps",
    "train.max_time_s",
    "train.log_every",
    "train.checkpoint_every_steps",
    "parallel",
    "data.root",
    "debug.fp_exceptions",
    "debug.halt_after",
    "logger.uri",
    "run.trust",
)
LENGTH = ("train.epochs", "train.max_steps")  # What a learning-rate schedule is planned for
CONFIG = "config.yaml"


def resumed(folder: str, parsed: list[Override]) -> DictConfig:
    """The configuration of the run in `folder`, with the overrides that are allowed.

    Raises:
        UsageError: there is no run, or an override would change its bits.
    """
    config = _saved(Path(folder))
    try:
        for override in parsed:
            _apply(config, override)
        _check_store(config, folder, {override.key_or_group for override in parsed})
        config.run.dir = config.run.resume = as_text(folder)
    except OmegaConfBaseException as error:  # a field of the file stands for nothing
        raise _invalid(Path(folder), _reason(error)) from None
    return config


def _apply(config: DictConfig, override: Override) -> None:
    key, value = override.key_or_group, override.value()
    if key == "run.resume":
        return
    if key in MAY_CHANGE:
        key = "parallel.name" if key == "parallel" else key
        _check_length(config, key, value)
        _check_skip(config, key, value)
        leaves()[key].set_in(config, value, f"'{override.input_line}'")
    elif not _is_same(config, key, value):
        raise UsageError(
            f"'{override.input_line}': a resumed run keeps its configuration; "
            f"legal changes: {', '.join(MAY_CHANGE)}{hint(key, MAY_CHANGE)}"
        )


def _saved(folder: Path) -> DictConfig:
    path = folder / CONFIG
    refuse_links(folder, ENTRIES)
    try:
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise _invalid(folder, "it is not a mapping")
        # as text: it was resolved when it was written, so `${oc.env:...}` in it is not mprun's
        config = OmegaConf.merge(OmegaConf.structured(Config), as_text(content))
        config.run.trust = False  # the folder cannot vouch for itself: the command line can
    except OSError as error:
        if isinstance(error, FileNotFoundError) and has_begun(folder):
            raise UsageError(_nothing_recorded(folder)) from None
        raise UsageError(
            f"run.resume={folder}: {path} cannot be read ({error.strerror}); "
            "write the folder of a run"
        ) from None
    except (OmegaConfBaseException, NotYamlError, ValueError, TypeError, RecursionError) as error:
        raise _invalid(folder, _reason(error)) from None
    assert isinstance(config, DictConfig)
    return config


def _invalid(folder: Path, reason: str) -> UsageError:
    path = folder / CONFIG
    return UsageError(f"run.resume={folder}: {path} is not a valid configuration ({reason})")


def _reason(error: Exception) -> str:
    """The first line of an error, after the field that it is about."""
    key = getattr(error, "full_key", None)
    return f"{key}: {first_line(error)}" if key else first_line(error)


def _nothing_recorded(folder: Path) -> str:
    again = shlex.quote(f"run.dir={folder}")
    return (
        f"run.resume={folder}: the run ended before anything was recorded, so there is nothing to "
        f"resume; begin it again with its own overrides: mprun OVERRIDES {again}"
    )


def _check_length(config: DictConfig, key: str, value: Any) -> None:
    scheduled = config.train.scheduler != "none"
    if key in LENGTH and scheduled and value != OmegaConf.select(config, key):
        raise UsageError(
            f"{key}={value}: the run's train.scheduler={config.train.scheduler} was planned "
            f"for {key}={OmegaConf.select(config, key)}, which a resumed run keeps"
        )


def _check_store(config: DictConfig, folder: str, given: set[str]) -> None:
    """Send nothing to an address from the folder, and change no file that it names."""
    uri = config.logger.uri
    if uri is not None and "logger.uri" not in given and not config.run.trust:
        raise UsageError(
            f"run.resume={folder}: the run's logger.uri={uri} is where its figures go; if the "
            "folder is yours, add run.trust=true, else logger.uri=null or an address of yours"
        )


def _check_skip(config: DictConfig, key: str, value: Any) -> None:
    """Dropping steps changes the run's bits; reporting exceptions does not."""
    saved = config.debug.fp_exceptions
    if key == "debug.fp_exceptions" and value != saved and "skip" in (value, saved):
        raise UsageError(
            f"{key}={value}: skip decides what is computed, and the run has {saved}; "
            "legal changes: between off, log and halt"
        )


def _is_same(config: DictConfig, key: str, value: Any) -> bool:
    """Whether the override repeats the run's value."""
    if key == "recipe" and (file := named_file(value)) is not None:
        return (config.recipe.file, config.recipe.target) == (str(file.path), file.kind)
    if key in GROUPS and "name" not in config[key]:  # the option is identified by its fields
        return bool(compose("config", overrides=[f"{key}={value}"])[key] == config[key])
    saved = OmegaConf.select(config, f"{key}.name" if key in GROUPS else key)
    return bool(saved == value) or str(saved) == str(value)  # `precision.name=123` is a number
