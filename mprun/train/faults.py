"""Errors that end a run: the reason is recorded, and the user gets one line with a remedy."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Literal

from mprun.errors import (
    MachineFailedError,
    MprunError,
    RunFailedError,
    is_from_code,
    traceback_text,
)
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import Summary
from mprun.train.checkpoint import CheckpointMisfitError
from mprun.train.user_code import described, is_out_of_memory

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextlib.contextmanager
def explain_faults(summary: Summary, folder: RunFolder) -> Iterator[None]:
    """Record an error that is raised inside, and replace it by one line for the user.

    Raises:
        MprunError: the one raised inside; with the traceback of its cause, if it has one.
        MachineFailedError: in place of an exception of a full disk or a lack of memory.
        RunFailedError: in place of any other, whose traceback is written to traceback.txt.
    """
    try:
        yield
    except CheckpointMisfitError:  # nothing was trained: the record is as it was
        raise
    except MprunError as error:
        is_machine = isinstance(error, MachineFailedError)
        _record(summary, folder, str(error), "machine" if is_machine else "run")
        if error.__cause__ is None or type(error) is not RunFailedError:
            raise
        raise RunFailedError(f"{error} {_write_traceback(error, folder)}") from None
    except BaseException as error:
        exits = isinstance(error, SystemExit)  # a model may call sys.exit()
        if not (exits or is_from_code(error)):
            raise
        if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
            reason, text = _disk_full(error, summary, folder)
        elif is_out_of_memory(error):
            reason = text = (
                f"out of memory on {summary.hardware.device} with "
                f"{summary.batch.micro} samples a micro-batch; try a smaller "
                "train.batch_size with train.accumulate"
            )
        else:
            reason = described(error, summary.precision)
            _record(summary, folder, reason, "run")
            text = f"the run failed: {reason} {_write_traceback(error, folder)}"
            raise RunFailedError(text) from None
        _record(summary, folder, reason, "machine")
        raise MachineFailedError(text) from None


def _record(
    summary: Summary, folder: RunFolder, reason: str, by: Literal["run", "machine"]
) -> None:
    """Write the last summary, if the disk has room."""
    summary.status, summary.error, summary.failed_by = "failed", reason, by
    with contextlib.suppress(OSError):
        folder.summary(summary)


def _disk_full(error: OSError, summary: Summary, folder: RunFolder) -> tuple[str, str]:
    """The reason for the record, and the line for the user."""
    can_resume = (folder.path / "config.yaml").exists()
    command = f"mprun run.resume={folder.path}" if can_resume else "start again in another folder"
    return f"the record cannot be written: {error.strerror}", (
        f"the record cannot be written ({error.strerror}): the run ended at step {summary.steps}; "
        f"what was recorded is in {folder.path}; make room, then: {command}"
    )


def _write_traceback(error: BaseException, folder: RunFolder) -> str:
    """Write the traceback of an exception; returns a text with its path."""
    try:
        path = folder.traceback(traceback_text(error))
    except OSError:
        return "(its traceback could not be written)"
    return f"(the traceback is in {path})"
