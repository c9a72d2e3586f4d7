"""Trackers print, log and warn while they work; a run's output has none of it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator

TALKERS = ("mlflow", "alembic", "wandb", "trackio", "httpx")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing is printed, logged below an error, or warned about."""
    loggers = [logging.getLogger(name) for name in TALKERS]
    levels = [logger.level for logger in loggers]
    nowhere = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Inside, these environment variables are set, except those that the user has set."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
