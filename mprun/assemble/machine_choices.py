"""Choices that depend on the machine: the device and whose kernels compute."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mprun import devices
from mprun.errors import UsageError
from mprun.precision import Policy, execution


def choose_device(wanted: str) -> torch.device:
    """The device; `auto` is the accelerator if there is one.

    Raises:
        UsageError: this machine has no such device.
    """
    try:
        return devices.find(wanted)
    except ValueError as error:
        raise UsageError(str(error)) from None


def choose_execution(
    wanted: str,
    policy: Policy,
    device: torch.device,
    speed: str = "auto",
    layers: Collection[str] = (),
    guard: str = "off",
) -> execution.ExecutionChoice:
    """`precision.execution.choose_execution`, for a configuration.

    Raises:
        UsageError: the execution asked for is impossible.
    """
    try:
        return execution.choose_execution(wanted, policy, device, speed, layers, guard)
    except ValueError as error:
        raise UsageError(str(error)) from None
