"""Loggers: further outputs for a run's scalars. The record is always written.

A logger writes between steps, when losses are read anyway. A thread that writes during the next
step would add to that step's time; where a tracker has one, it gets its rows at most every two
seconds. A logger never decides about a run: if it fails, the user gets one warning, and the run
goes on without it.

To add one, write a subclass of `Logger`, add it to `LOGGERS`, add conf/logger/NAME.yaml and an
extra NAME.
"""

from __future__ import annotations

from mprun.errors import UsageError, hint
from mprun.train.loggers.logger import LoggedRun, Logger, Tell, ignore
from mprun.train.loggers.mlflow_logger import MlflowLogger
from mprun.train.loggers.tensorboard_logger import TensorBoardLogger
from mprun.train.loggers.trackio_logger import TrackioLogger
from mprun.train.loggers.wandb_logger import WandbLogger

__all__ = ["LOGGERS", "LoggedRun", "Logger", "build_loggers", "check_logger"]

LOGGERS: dict[str, type[Logger] | None] = {
    "none": None,
    "tensorboard": TensorBoardLogger,
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
}
"""The values of logger.name."""


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
