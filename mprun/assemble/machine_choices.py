"""Choices that depend on the machine: the device and whose kernels compute."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mprun.errors import UsageError
from mprun.precision import Policy, execution


def choose_device(wanted: str) -> torch.device:
    """The device; `auto` is CUDA if there is a CUDA device."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("device=cuda: PyTorch finds no CUDA device here; legal: auto, cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def choose_execution(
    wanted: str,
    policy: Policy,
    device: torch.device,
    speed: str = "auto",
    layers: Collection[str] = (),
) -> execution.ExecutionChoice:
    """`precision.execution.choose_execution`, for a configuration.

    Raises:
        UsageError: the execution asked for is impossible.
    """
    try:
        return execution.choose_execution(wanted, policy, device, speed, layers)
    except ValueError as error:
        raise UsageError(str(error)) from None
