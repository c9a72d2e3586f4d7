"""Checkpoints: the state of a run between two steps, in one file.

A file is written whole or not at all (a temporary file, synced, then renamed). Reading someone
else's checkpoint runs no code: see `torch_file.py`. Its content is checked in two steps: what
decides how the run is assembled, before it is; the rest against the state of the assembled run.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from mprun.errors import MprunError, UsageError, first_line
from mprun.records.checkpoint_record import SavedRun
from mprun.records.files import write_atomic
from mprun.records.reader import converted
from mprun.records.run_record import Summary
from mprun.train.callbacks import Callback
from mprun.train.torch_file import load_torch_file

FORMAT_VERSION = 1
NAME = "last.pt"
PARTS = ("choices", "trainer", "journal")
"""The keys that a resumed run needs. `journal` is the recorder's state."""


class CheckpointMisfitError(UsageError):
    """A checkpoint does not fit the run that it was read for; the run's record is as it was."""


def path_in(run: Path) -> Path:
    """The path of a run's last checkpoint."""
    return run / "checkpoints" / NAME


def save(run: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain values) as the last checkpoint of `run`.

    Raises:
        OSError: the disk is full or the folder cannot be written; an earlier file stays.
    """
    buffer = io.BytesIO()
    torch.save({"format_version": FORMAT_VERSION, **state}, buffer)
    write_atomic(path_in(run), buffer.getvalue())


def load(run: Path) -> dict[str, Any] | None:
    """The last checkpoint of `run`, on the CPU; None if none was written yet.

    Raises:
        UsageError: the file is damaged, or a later version of mprun wrote it.
    """
    path = path_in(run)
    if not path.exists():
        return None
    try:
        state = checked(load_torch_file(path), path)
    except MprunError:
        raise
    except Exception as error:  # unpickling a damaged file raises almost anything
        raise _no_checkpoint(path, error) from None
    known = converted(path, state, SavedRun)
    if known.trainer.step != known.journal.steps:
        raise UsageError(
            f"{path} is damaged: trainer.step is {known.trainer.step}, and journal.steps is "
            f"{known.journal.steps}"
        )
    return state


def checked(content: Any, path: Path) -> dict[str, Any]:
    """The content of the file `path` as a checkpoint that a run can be resumed from.

    Raises:
        UsageError: it is no such checkpoint, or a later version of mprun wrote it.
    """
    try:
        state: dict[str, Any] = dict(content)
        later = state["format_version"] > FORMAT_VERSION
        missing = [] if later else [key for key in PARTS if key not in state]
    except Exception as error:  # the content can be of any type
        raise _no_checkpoint(path, error) from None
    if later:
        version = state["format_version"]
        raise UsageError(f"{path} has format {version}, this mprun reads up to {FORMAT_VERSION}")
    if missing:
        raise UsageError(f"{path} is no checkpoint of mprun (it lacks {', '.join(missing)})")
    return state


def _no_checkpoint(path: Path, error: Exception) -> UsageError:
    reason = first_line(error) if str(error).strip() else type(error).__name__
    return UsageError(f"{path} is no checkpoint of mprun ({reason})")


@contextlib.contextmanager
def restoring(run: Path) -> Iterator[None]:
    """Inside, the last checkpoint of `run` is loaded into the assembled run.

    Raises:
        CheckpointMisfitError: it does not fit.
    """
    try:
        yield
    except Exception as error:  # its content can be of any type
        raise CheckpointMisfitError(
            f"{path_in(run)} does not fit this run: {_misfit(error)}"
        ) from None


def _misfit(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())}"[:300]


class Stateful(Protocol):
    """An object whose state is part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


class Checkpointer(Callback):
    """Saves a checkpoint whenever the loop emits its state.

    Args:
        run: the run's folder.
        parts: objects that are saved beside the loop, by key.
        facts: plain values about the run, by key.
    """

    def __init__(self, run: Path, parts: Mapping[str, Stateful], facts: Mapping[str, Any]) -> None:
        self._run, self._parts, self._facts = run, parts, facts

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        save(self._run, {"trainer": state, **parts, **self._facts})


def run_facts(summary: Summary) -> dict[str, Any]:
    """The values of a summary that identify the run a checkpoint is from."""
    keys = ("recipe", "seed", "precision", "effective", "variant_hash", "mprun_version")
    return {key: value for key, value in asdict(summary).items() if key in keys}
