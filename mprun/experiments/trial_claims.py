"""Which process runs which trial: any number of processes may work on one study.

A process that runs a trial holds a lock in the study's folder `.claims/`. The system releases it
when the process ends, however it ends: a trial whose process was killed is open again, and another
process resumes it. On several machines the folder has to be on a file system with locks for all of
them (NFS has them; Lustre with the mount option `flock`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from mprun.doctor.environment import host
from mprun.errors import UsageError
from mprun.records.files import refuse_links

FOLDER = ".claims"


class TrialClaims:
    """The locks of a study.

    Args:
        study: its folder.

    Raises:
        UsageError: the folder cannot be written, or has a link in place of a lock.
    """

    def __init__(self, study: Path) -> None:
        self._folder = study / FOLDER
        refuse_links(study, [FOLDER])
        try:
            self._folder.mkdir(exist_ok=True)
            refuse_links(self._folder, [path.name for path in self._folder.iterdir()])
        except OSError as error:
            raise UsageError(f"{study} cannot be written ({error.strerror})") from None

    @contextmanager
    def held(self, name: str) -> Iterator[bool]:
        """Inside, this process holds the lock of this name; False if another process does.

        Raises:
            UsageError: the folder cannot be written, or its file system has no locks.
        """
        lock = FileLock(self._folder / f"{name}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        except OSError as error:
            raise UsageError(f"{self._folder} cannot be written ({error.strerror})") from None
        except NotImplementedError:
            raise UsageError(
                f"{self._folder}: this file system has no locks; put the study on one that has them"
            ) from None
        try:
            yield True
        finally:
            lock.release()

    def record_start(self, name: str) -> None:
        """Add a line to `NAME.jsonl`: this process, which holds the lock, runs the trial now."""
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, "host": host(), "pid": os.getpid()})
        try:
            with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise UsageError(f"{self._folder} cannot be written ({error.strerror})") from None
