"""Learning-rate schedules: torch's own, and the no-op.

A schedule moves with the steps that the optimizer takes, not with those that dynamic loss scaling
skips. Otherwise a run whose first steps overflow would warm up without training.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


class Schedule(Protocol):
    """Moves the learning rate after each optimizer step."""

    def step(self, skipped: Tensor | None) -> None:
        """A step was attempted; `skipped` (scalar, None for never) is 1 where it was not taken."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""


class NoSchedule:
    """A constant learning rate."""

    def step(self, skipped: Tensor | None) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class TorchSchedule:
    """A torch scheduler, stepped where the optimizer was (on CUDA the host waits to know)."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler

    def step(self, skipped: Tensor | None) -> None:
        if skipped is None or not skipped.item():
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)
