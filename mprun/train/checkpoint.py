"""Checkpoints: the state of a run between two steps, in one file.

Written whole or not at all (a temporary file, synced, renamed), and loaded with
`weights_only=True`: reading someone else's checkpoint never runs code.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from mprun.errors import UsageError
from mprun.records.files import write_atomic

FORMAT_VERSION = 1
NAME = "last.pt"
PARTS = ("choices", "trainer", "journal")
"""What a run goes on from."""


def path_in(run: Path) -> Path:
    """Where a run's last checkpoint lies."""
    return run / "checkpoints" / NAME


def save(run: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain values) as the last checkpoint of `run`.

    Raises:
        OSError: the disk is full or the folder cannot be written; an earlier file is kept.
    """
    buffer = io.BytesIO()
    torch.save({"format_version": FORMAT_VERSION, **state}, buffer)
    write_atomic(path_in(run), buffer.getvalue())


def load(run: Path) -> dict[str, Any] | None:
    """The last checkpoint of `run`, on the CPU; None where none was written yet.

    Raises:
        UsageError: the file is damaged, or a later version of mprun wrote it.
    """
    path = path_in(run)
    if not path.exists():
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a damaged file raises almost anything
        raise _no_checkpoint(path, error) from None
    return checked(found, path)


def checked(found: Any, path: Path) -> dict[str, Any]:
    """What was read from `path` as a checkpoint that a run can go on from.

    Raises:
        UsageError: it is none, or a later version of mprun wrote it.
    """
    try:
        state: dict[str, Any] = dict(found)
        later = state["format_version"] > FORMAT_VERSION
        missing = [] if later else [key for key in PARTS if key not in state]
    except Exception as error:  # it can be anything
        raise _no_checkpoint(path, error) from None
    if later:
        version = state["format_version"]
        raise UsageError(f"{path} has format {version}, this mprun reads up to {FORMAT_VERSION}")
    if missing:
        raise UsageError(f"{path} is no checkpoint of mprun (it lacks {', '.join(missing)})")
    return state


def _no_checkpoint(path: Path, error: Exception) -> UsageError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UsageError(f"{path} is no checkpoint of mprun ({reason})")
