"""Learning-rate schedules.

A schedule moves with the steps that the optimizer takes, not with those that dynamic loss scaling
skips. Otherwise a run whose first steps overflow would warm up without training.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from mprun._torch import is_fake


class Schedule:
    """Moves the learning rate after each step that the optimizer takes.

    Args:
        scheduler: torch's; None for a constant learning rate.
    """

    def __init__(self, scheduler: LRScheduler | None = None) -> None:
        self._scheduler = scheduler

    def step(self, skipped: Tensor | None) -> None:
        """A step was attempted.

        Args:
            skipped: a scalar, 1 if the step was not taken (on CUDA the host waits to know it);
                None if no step is ever skipped.
        """
        if self._scheduler is None:
            return
        if skipped is None or is_fake(skipped) or not skipped.item():
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""
        return {} if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue.

        Raises:
            KeyError: it is the state of no schedule.
        """
        if self._scheduler is not None:
            if "_schedulers" not in state:  # a chain counts in its members
                self._scheduler.last_epoch = state["last_epoch"]
            self._scheduler.load_state_dict(state)
