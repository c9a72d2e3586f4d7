"""Waiting until something has happened in another process."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

# A process that starts while a machine is busy may need minutes to import torch.
PATIENCE_S = 300.0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Return once the condition holds.

    Args:
        condition: asked every few milliseconds.
        process: the process that brings it about; once that has ended, waiting is in vain.

    Raises:
        AssertionError: the process ended without it (with what it wrote), or time is up.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if process is not None and process.poll() is not None and not condition():
            raise AssertionError(f"status {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline, f"nothing happened in {PATIENCE_S:g} s"
        time.sleep(0.002)


def is_filled(file: Path) -> bool:
    """Whether a file exists and holds something."""
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        return False
