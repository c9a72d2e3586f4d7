"""The choices that a trial of `speed=auto` found, kept for later runs on this machine.

A small JSON file for each machine, model and shape in the user's cache folder. A file that is
damaged, or that another program wrote, counts as none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from mprun import kernels
from mprun.doctor.speed_choices import SpeedChoice
from mprun.records.files import write_atomic

LARGEST_BYTES = 64 * 1024
LOCK_TIMEOUT_S = 300.0
"""A trial that takes longer is made once more."""
FORMATS = ("contiguous", "channels_last")
IMPLEMENTATIONS = ("forloop", "foreach", "fused", "c", "inductor", "eager", "masters")


@dataclass(frozen=True)
class KeptChoice:
    """What a trial found."""

    choice: SpeedChoice
    reason: str
    """A sentence about the trial."""


def read(key: str) -> KeptChoice | None:
    """What an earlier trial found; None without one."""
    try:
        with _path(key).open("rb") as file:
            kept = msgspec.json.decode(file.read(LARGEST_BYTES), type=KeptChoice)
    except (OSError, ValueError):
        return None
    known = kept.choice.memory_format in FORMATS and kept.choice.optimizer_impl in IMPLEMENTATIONS
    return kept if known and kept.reason.isprintable() else None


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """Inside, no other process makes this trial; where nothing can be locked, one may."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            stack.enter_context(FileLock(_path(key).with_suffix(".lock"), timeout=LOCK_TIMEOUT_S))
        yield


def write(key: str, kept: KeptChoice) -> None:
    """Keep it; where nothing can be written, the next run tries again."""
    with contextlib.suppress(OSError):
        write_atomic(_path(key), msgspec.json.encode(kept))


def _path(key: str) -> Path:
    return kernels.cache_folder() / f"speed_{key}.json"
