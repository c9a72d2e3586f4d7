"""logger.json: the run of a tracker that belongs to a run's folder, and how far its curves go.

A resumed run takes steps again that a tracker has already: those after the last checkpoint. It
continues the tracker's run, and each curve only from the step where it ends. No torch.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mprun.errors import UsageError
from mprun.records.files import write_json
from mprun.records.reader import read_json

SCHEMA_VERSION = 1
FILE = "logger.json"

OWN_TAGS = (
    *("recipe", "precision", "variant", "variant_hash", "seed", "execution", "device", "hardware"),
    *("mprun_version", "git_commit", "status"),
)
"""Tags that a tracker gets of every run; `status` at its end."""


@dataclass(kw_only=True)
class LoggerRecord:
    """The content of logger.json."""

    schema_version: int = SCHEMA_VERSION
    logger: str
    """The option of the group `logger`."""
    id: str
    """The run's name in the tracker's own interface."""
    last_steps: dict[str, int] = field(default_factory=dict)
    """The last step of each curve."""


def read_logger_record(folder: Path, logger: str) -> LoggerRecord | None:
    """The record of a folder; None if there is none that can be used for this logger."""
    with contextlib.suppress(FileNotFoundError, UsageError):
        record = read_json(folder / FILE, LoggerRecord, SCHEMA_VERSION)
        if record.logger == logger and re.fullmatch(r"[\w. +=-]{1,128}", record.id):
            return record
    return None


def write_logger_record(folder: Path, record: LoggerRecord) -> None:
    """Replace logger.json.

    Raises:
        OSError: as `write_json` does.
    """
    write_json(folder / FILE, asdict(record))
