"""What checks of a device's kernels found, kept for later runs with the same PyTorch.

A small JSON file for each device in the user's cache folder. A file that is damaged, or that
another program wrote, counts as none.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import msgspec
import torch

from mprun import __version__, kernels
from mprun.doctor import environment
from mprun.records.files import write_atomic
from mprun.records.kernel_check_record import KernelCheck

LARGEST_BYTES = 2**20


def kept_check(device: torch.device) -> KernelCheck | None:
    """What an earlier check of this device with this PyTorch found; None without one."""
    try:
        with _path(device).open("rb") as file:
            return msgspec.json.decode(file.read(LARGEST_BYTES), type=KernelCheck)
    except (OSError, ValueError):
        return None


def keep_check(device: torch.device, check: KernelCheck) -> None:
    """Keep it; where nothing can be written, the next run checks again."""
    with contextlib.suppress(OSError):
        write_atomic(_path(device), msgspec.json.encode(check))


def _path(device: torch.device) -> Path:
    name = environment.hardware(device, []).name
    text = f"{device.type} {name} {torch.__version__} {torch.version.cuda} {__version__}"
    return kernels.cache_folder() / f"check_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
