"""Losses and counts of steps, read when it costs nothing.

On the CPU a scalar is there when its step is done, so it is read at once; keeping thousands of tiny
tensors alive between the large ones instead makes the allocator give memory back and fault it in
again at every step (measured: 30 to 50 page faults a step on `linear`). On CUDA reading a scalar
makes the host wait for the step, so scalars are copied into a buffer on the device and read
together, a fraction of a second late.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Reading(NamedTuple):
    """What a step computed."""

    loss: float
    correct: int | None


class Readings(Protocol):
    """Collects a reading per step."""

    @property
    def full(self) -> bool:
        """Whether the readings must be taken before the next step."""

    def put(self, loss: Tensor, correct: Tensor | None) -> None:
        """A step's loss and its count of right answers, both scalars; no count in a regression."""

    def take(self) -> list[Reading]:
        """The readings since the last call, in order."""


class HostReadings:
    """For the CPU: read at once."""

    full = False

    def __init__(self) -> None:
        self._found: list[Reading] = []

    def put(self, loss: Tensor, correct: Tensor | None) -> None:
        count = None if correct is None else int(correct.item())
        self._found.append(Reading(loss.item(), count))

    def take(self) -> list[Reading]:
        taken, self._found = self._found, []
        return taken


class DeviceReadings:
    """For CUDA: kept on the device, read together.

    Args:
        device: where the scalars are.
        capacity: steps after which the readings must be taken.
    """

    def __init__(self, device: torch.device, capacity: int = 1024) -> None:
        self._losses = torch.zeros(capacity, device=device)
        self._counts = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._capacity, self._n, self._counted = capacity, 0, False

    @property
    def full(self) -> bool:
        return self._n == self._capacity

    def put(self, loss: Tensor, correct: Tensor | None) -> None:
        self._losses[self._n] = loss.detach()
        self._counted = correct is not None
        if correct is not None:
            self._counts[self._n] = correct
        self._n += 1

    def take(self) -> list[Reading]:
        n, self._n = self._n, 0
        counts = self._counts[:n].tolist() if self._counted else [None] * n
        losses = self._losses[:n].tolist()
        return [Reading(loss, count) for loss, count in zip(losses, counts, strict=True)]


def readings_for(device: torch.device) -> Readings:
    """The kind that fits a device."""
    return DeviceReadings(device) if device.type == "cuda" else HostReadings()
