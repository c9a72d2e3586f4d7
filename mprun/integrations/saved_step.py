"""A training step in a file: what it needs to be run again, wherever its model can be made.

The file holds tensors and plain values alone, so that reading one never runs code: the weights at
the step's beginning, the arguments of each call of the model, the gradients that the loss sent back
into it, the states of the random numbers, the state of autocast. Values of other kinds among the
arguments are left out, and named.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from mprun.errors import UsageError, first_line
from mprun.train.torch_file import load_torch_file

FORMAT = "mprun saved step"
VERSION = 1
PLAIN = (bool, int, float, str, type(None))


@dataclass(kw_only=True)
class SavedCall:
    """One call of the model: a micro-batch of the step."""

    args: list[Any]
    kwargs: dict[str, Any]
    random: dict[str, Any]
    """States of random numbers before the call: torch, cuda, python, numpy; None where unused."""
    autocast: str | None
    """The dtype of autocast at the call; None without it."""
    evaluating: list[str]
    """Modules that were not in training mode."""
    output_gradients: dict[int, Tensor]
    """Number of an output tensor to the gradient of the loss with respect to it."""
    changed: list[str] = field(default_factory=list)
    """Arguments that were changed in place after the call."""


@dataclass(kw_only=True)
class SavedStep:
    """The content of a file."""

    step: int
    reason: str
    """Why it was saved."""
    model: str
    """The class of the model."""
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    """Before the step's first call."""
    calls: list[SavedCall]
    batches: list[Any]
    """What the loop noted, one for each micro-batch; empty if it noted nothing."""
    autocast: str | None
    """The dtype of autocast inside of the model."""
    left_out: list[str]
    """Kinds of arguments that a file cannot hold."""
    versions: dict[str, str]
    device: str


def plain(value: Any, left_out: list[str]) -> Any:
    """`value` as a file holds it: tensors without graph or spare storage, plain containers.

    Args:
        value: nested tuples, lists, mappings and dataclasses.
        left_out: gets the kinds of values that are replaced by None.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v, left_out) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(x, left_out) for x in value)
    if isinstance(value, list):
        return [plain(x, left_out) for x in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name, None), left_out) for f in fields(value)}
    left_out.append(type(value).__name__)
    return None


def write_step(path: Path, saved: SavedStep) -> None:
    """Write a step, whole or not at all.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            torch.save({"format": FORMAT, "version": VERSION, **asdict(saved)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_step(path: Path) -> SavedStep:
    """A step from its file, on the CPU; no code of the file is run.

    Raises:
        UsageError: there is no such file, or it is no saved step.
    """
    try:
        content = load_torch_file(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        raise UsageError(f"{path} is no saved step: {first_line(error)}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(
            f"{path} is no saved step: mprun.observe(..., on_nonfinite='save') writes them"
        )
    if content.get("version") != VERSION:
        raise UsageError(
            f"{path} has version {content.get('version')!r}, this mprun reads {VERSION}"
        )
    known = {k: v for k, v in content.items() if k not in ("format", "version")}
    try:
        return msgspec.convert(known, SavedStep, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
