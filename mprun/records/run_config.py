"""A run's `config.yaml` as plain data, the hash of the variant that it describes, and logger.json.

logger.json names the run of a tracker that belongs to a run's folder, and how far its curves go: a
resumed run takes steps again that a tracker has already, those after the last checkpoint. It
continues the tracker's run, and each curve only from the step where it ends. No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mprun.errors import UsageError
from mprun.records.files import write_json
from mprun.records.policy_columns import LATER_COLUMNS
from mprun.records.reader import NotYamlError, read_json, read_yaml

MAX_BYTES = 256 * 1024
# Fields that earlier versions did not have, with the value that changes nothing: without them a
# variant has the hash that its earlier runs have
LATER_TRAIN: dict[str, Any] = {"warmup_steps": 0, "min_lr": 0.0}
LATER_OPTIMIZER: dict[str, Any] = {"target": None, "args": {}}
LATER_PARALLEL: dict[str, Any] = {"name": "none", "world_size": 1}
# The shipped options of the group `speed`, which earlier versions have by name alone
SPEEDS: dict[str, dict[str, Any]] = {
    "auto": {"name": "auto", "compile": "auto"},
    "plain": {"name": "plain", "compile": False},
}


class UnreadableConfigError(Exception):
    """Why a configuration cannot be read, as `it is ...`."""


def read_config(run: Path) -> Any:
    """The content of a run's configuration, or `UnreadableConfigError`."""
    try:
        return read_yaml(run / "config.yaml", MAX_BYTES)
    except OSError as error:
        raise UnreadableConfigError(f"it cannot be read ({error.strerror})") from None
    except NotYamlError as error:
        raise UnreadableConfigError(f"it is not valid YAML ({error})") from None


def variant_config(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration without seed, paths and loggers: it defines a variant."""
    config: dict[str, Any] = json.loads(json.dumps(resolved))  # a copy, which is cut below
    for key in ("seed", "run", "logger"):
        config.pop(key, None)
    for key in ("root", "workers"):
        config.get("data", {}).pop(key, None)
    config.get("recipe", {}).pop("file", None)  # `recipe_sha256` of the record has its content
    config.get("preset", {}).pop("name", None)  # what it sets stays
    train = config.get("train", {})
    for key in ("log_every", "checkpoint_every_steps", "validations", "average_weights"):
        train.pop(key, None)
    for section, later in (
        (train, LATER_TRAIN),
        (train.get("optimizer", {}), LATER_OPTIMIZER),
        (config.get("precision", {}), LATER_COLUMNS),
        (config.get("parallel", {}), LATER_PARALLEL),
    ):
        for key, default in later.items():
            if key in section and section[key] == default:
                del section[key]
    config = {key: value for key, value in config.items() if key != "parallel" or value}
    if "speed" in config:
        own = config["speed"]  # a shipped option by its name alone, as earlier versions have it
        config["speed"] = next((name for name, x in SPEEDS.items() if x == own), own)
    # of debugging, only steps dropped change what is computed
    if config.pop("debug", {}).get("fp_exceptions") == "skip":
        config["debug"] = {"fp_exceptions": "skip"}
    for key in ("lower_file", "fp32_file", "promote_file", "strict", "verbose"):
        config.get("op_lists", {}).pop(key, None)  # the names in the files stay
    return config


def variant_hash(resolved: Mapping[str, Any]) -> str:
    """Twelve hex digits; runs with equal hashes differ in seed, paths and loggers alone."""
    text = json.dumps(variant_config(resolved), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def config_fields(config: Any, prefix: str = "") -> dict[str, str]:
    """Dotted names and values, in order: `train.lr` to `0.001`."""
    if not isinstance(config, Mapping):
        raise UnreadableConfigError("it is not a mapping")
    fields = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            fields.update(config_fields(value, f"{prefix}{key}."))
        else:
            fields[f"{prefix}{key}"] = yaml_text(value)
    return fields


def yaml_text(value: Any) -> str:
    """A value as a user would type it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(yaml_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


SCHEMA_VERSION = 1
FILE = "logger.json"

# Tags that a tracker gets of every run; `status` at its end
OWN_TAGS = (
    *("recipe", "precision", "variant", "variant_hash", "seed", "execution", "device", "hardware"),
    *("mprun_version", "git_commit", "status"),
)


@dataclass(kw_only=True)
class LoggerRecord:
    """The content of logger.json."""

    schema_version: int = SCHEMA_VERSION
    logger: str  # The option of the group `logger`
    id: str  # The run's name in the tracker's own interface
    last_steps: dict[str, int] = field(default_factory=dict)  # The last step of each curve


def read_logger_record(folder: Path, logger: str) -> LoggerRecord | None:
    """The record of a folder; None if there is none that can be used for this logger."""
    with contextlib.suppress(FileNotFoundError, UsageError):
        record = read_json(folder / FILE, LoggerRecord, SCHEMA_VERSION)
        # the folder may be anyone's, and the id becomes a part of paths and addresses
        if record.logger == logger and re.fullmatch(r"[\w. +=-]{1,128}", record.id):
            return record
    return None


def write_logger_record(folder: Path, record: LoggerRecord) -> None:
    """Replace logger.json; raises as `write_json` does."""
    write_json(folder / FILE, asdict(record))
