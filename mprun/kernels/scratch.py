"""Folders that a compiler works in, and what a killed process leaves of them.

A process locks its folder, and the system releases the lock when the process ends, however it ends.
So a folder whose lock is free was abandoned: the next process that compiles ends the compiler that
may still work there, and removes the folder. The compiler has the folder as its TMPDIR: its
temporary files go with the folder, and its processes are recognized by it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

fcntl: Any = None
with contextlib.suppress(ImportError):  # Windows has none
    fcntl = importlib.import_module("fcntl")

NEW, LOCKED = ".new-", "compiling-"
"""How the names begin. Only locked folders are looked at: a new one is not locked for a moment."""


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder for a compiler, locked while it is in use and removed afterwards."""
    new = Path(tempfile.mkdtemp(prefix=NEW, dir=parent))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, new, ignore_errors=True)
        if (lock := _lock(new)) is not None:
            stack.callback(os.close, lock)
        folder = new.rename(parent / f"{LOCKED}{new.name.removeprefix(NEW)}")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed, and end their compilers."""
    for folder in parent.glob(f"{LOCKED}*"):
        if (lock := _lock(folder)) is not None:
            _end_compilers(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that locks a folder; None if another process does, or nothing can lock it."""
    if fcntl is None:
        return None
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            os.close(descriptor)
    return None


def _end_compilers(folder: Path) -> None:
    """Kill the processes that have this folder as their TMPDIR."""
    own = f"TMPDIR={folder}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            if own in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
