"""Learning-rate schedules: torch's own, and the no-op."""

from __future__ import annotations

from typing import Any, Protocol


class Schedule(Protocol):
    """What the loop and a checkpoint need of a torch learning-rate scheduler."""

    def step(self) -> None:
        """An optimizer step was taken."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue."""


class NoSchedule:
    """A constant learning rate."""

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
