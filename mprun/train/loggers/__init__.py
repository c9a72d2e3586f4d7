"""Loggers: further outputs for a run's scalars. The record is always written.

A logger writes between steps, when losses are read anyway. It never decides about a run: if it
fails, the user gets one warning, and the run goes on without it.

To add one, write a subclass of `Logger` in trackers.py, name it in `LOGGERS`, and write
conf/logger/NAME.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable

from mprun.errors import UsageError, hint
from mprun.train.loggers.logger import LoggedRun, Logger, Tell, ignore
from mprun.train.loggers.trackers import (
    MlflowLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)

__all__ = ["LOGGERS", "LoggedRun", "Logger", "build_loggers", "check_logger", "unused_fields"]

# The values of logger.name
LOGGERS: dict[str, type[Logger] | None] = {
    "none": None,
    **{kind.NAME: kind for kind in (MlflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger)},
}


def check_logger(name: str, online: bool = False) -> None:
    """Raise `UsageError` unless `build_loggers` can make this logger here.

    Args:
        name: a key of `LOGGERS`.
        online: whether it is to send its data away (`logger.mode=online`).
    """
    if name not in LOGGERS:
        legal = ", ".join(LOGGERS)
        raise UsageError(f"logger.name={name}: legal: {legal}{hint(name, LOGGERS)}")
    if (logger := LOGGERS[name]) is not None:
        logger.check(online)


def unused_fields(name: str, given: Iterable[str]) -> dict[str, str]:
    """A sentence for each key of the configuration that the user set and a logger does not use."""
    logger = LOGGERS[name]
    used = ("name", *(() if logger is None else logger.FIELDS))
    # the second word: logger.tags.NAME belongs to the field `tags`
    keys = [k for k in given if k.startswith("logger.") and k.split(".")[1] not in used]
    return {key: f"{key} has no effect: logger={name} does not use it" for key in keys}


def build_loggers(
    name: str, run: LoggedRun, warn: Tell = ignore, report: Tell = ignore
) -> list[Logger]:
    """The callbacks for `logger.name`; nothing is written before the first step.

    Args:
        name: a key of `LOGGERS`.
        run: what is known of the run.
        warn: called with a sentence when the logger fails.
        report: called with a line for the user.
    """
    check_logger(name, run.online)
    logger = LOGGERS[name]
    return [] if logger is None else [logger(run, warn, report)]
