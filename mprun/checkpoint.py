"""Checkpoints: the state of a run between two steps, in one file.

Loaded with `weights_only=True`: reading someone else's checkpoint never runs code.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch

from mprun.record import write_atomic
from mprun.runner import Trainer

FORMAT_VERSION = 1


def save(path: Path, trainer: Trainer) -> None:
    """Write the trainer's state to `path`, whole or not at all.

    Raises:
        OSError: the disk is full or the folder cannot be written; an earlier file is kept.
    """
    buffer = io.BytesIO()
    torch.save({"format_version": FORMAT_VERSION, **trainer.state_dict()}, buffer)
    write_atomic(path, buffer.getvalue())
