"""Checks of the fields of `logger`, without the packages of the loggers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from mprun.config.schema import LoggerConfig
from mprun.errors import UsageError
from mprun.records.logger_record import OWN_TAGS

SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
"""MLflow's stores; that of plain files is on its way out."""

USED_BY = {
    "project": ("mlflow", "wandb", "trackio"),
    "run_name": ("mlflow", "wandb", "trackio"),
    "tags": ("tensorboard", "mlflow", "wandb", "trackio"),
    "uri": ("mlflow",),
    "mode": ("wandb",),
}
"""Field to the loggers that use it."""
TAG_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"
LONGEST = 128
"""Characters of a project or of a run's name; W&B takes no longer ones."""


def check_logger_fields(config: LoggerConfig) -> None:
    """Raise `UsageError` for the first field that no logger can use."""
    for key in ("project", "run_name"):
        value = getattr(config, key)
        if value is not None and not _is_name(value):
            raise UsageError(
                f"logger.{key}={value!r}: legal is a name of at most {LONGEST} characters without "
                "control characters, or null"
            )
    for name in config.tags:
        if name in OWN_TAGS:
            raise UsageError(
                f"logger.tags.{name}: mprun sets this tag itself; legal is any other name"
            )
        if re.fullmatch(TAG_NAME, name) is None:
            raise UsageError(
                f"logger.tags.{name!r}: legal is a name of letters, digits and _.- that begins "
                "with a letter, of at most 64 characters"
            )
    if config.uri is not None:
        _check_uri(config.uri)


def _is_name(value: str) -> bool:
    return bool(value.strip()) and value.isprintable() and len(value) <= LONGEST


def _check_uri(uri: str) -> None:
    try:
        parts = urlsplit(uri)
        password = parts.password
    except ValueError:  # brackets of an address that do not close
        raise UsageError(f"logger.uri={uri!r} is no address; {LEGAL_URI}") from None
    scheme = parts.scheme.partition("+")[0] or uri
    has_place = scheme == "databricks" or f"{parts.scheme}://" in uri
    if scheme not in SCHEMES or not has_place or not uri.isprintable():
        raise UsageError(f"logger.uri={uri!r} is no store of MLflow; {LEGAL_URI}")
    if password is not None:
        raise UsageError(
            "logger.uri has a password, and the configuration is recorded; legal is an address "
            "without one: set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD"
        )


LEGAL_URI = (
    "legal: sqlite:///FILE, https://SERVER, another of its database URIs, or null for a file "
    "beside the runs"
)


def unused_logger_fields(config: LoggerConfig) -> Iterator[tuple[str, str]]:
    """Each field that this logger does not use, with the reason."""
    for field, users in USED_BY.items():
        if config.name not in users:
            yield f"logger.{field}", f"logger={config.name} does not use it"
