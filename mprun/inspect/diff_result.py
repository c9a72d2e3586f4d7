"""The content of a capture: the errors that arise in one side of a comparison. No torch.

A capture is made where the side runs, on its device and with its version of PyTorch; two captures
are compared anywhere (`mprun diff`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

SCHEMA_VERSION = 1
MAX_ERROR = 1e99  # Written for an error without a finite size


@dataclass(frozen=True)
class SideError:
    """One side's error in a module's own code."""

    dtype: str
    arising: float  # Relative rms; infinite where a number is not finite
    inherited: float
    bias: float  # Mean of the arising error, over the rms of the exact numbers
    explained: float  # The largest arising error that the dtype explains

    @property
    def is_explained(self) -> bool:
        """Whether the dtype explains it."""
        return self.arising <= self.explained


@dataclass(frozen=True)
class CapturedCall:
    """A module's own code in one pass."""

    phase: str  # forward or backward
    module: str  # A name of `named_modules()`; empty for the model itself
    call: int  # The number of the module's call, from 0
    kind: str  # The module's class
    errors: dict[str, SideError]
    """By what is compared: an output, the gradient at an input, a parameter's gradient."""


class OpError(NamedTuple):
    """One op."""

    phase: str
    module: str
    op: str
    dtype: str
    error: float  # The rms of the error that arises in it, over the rms of its exact result


@dataclass(frozen=True, kw_only=True)
class CaptureRecord:
    """The content of capture.json."""

    schema_version: int
    recipe: str
    data: str
    data_source: str
    precision: str
    step: int  # Of the checkpoint
    loss: float
    device: str
    hardware: str
    versions: dict[str, str | None]
    weights_sha256: str
    batch_sha256: str
    compiled: bool
    calls: list[CapturedCall]
    ops: list[OpError]


def bounded(value: Any) -> Any:
    """Plain values in which numbers that are not finite are the largest one."""
    if isinstance(value, dict):
        return {k: bounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [bounded(v) for v in value]
    if isinstance(value, float) and not abs(value) < MAX_ERROR:
        return MAX_ERROR
    return value
