"""What the loop tells, and whom."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from mprun.records.run_record import Epoch


class StepLine(NamedTuple):
    """What is known of one optimizer step."""

    step: int
    epoch: int
    loss: float
    lr: float
    loss_scale: float
    skipped: bool
    step_time_ms: float
    data_time_ms: float
    timed: bool
    """Whether it enters the statistics: a full-size batch."""


class Observer(Protocol):
    """Is told what happens, in order."""

    def steps(self, lines: list[StepLine]) -> None:
        """Steps that were taken since the last call."""

    def event(self, row: dict[str, Any], warning: str | None = None) -> None:
        """Something happened in a step: its line of metrics.jsonl, and what the user should know.

        It comes before the call of `steps` with that step.
        """

    def epoch(self, epoch: Epoch) -> None:
        """An epoch ended and was validated."""

    def checkpoint(self) -> None:
        """A checkpoint is due; everything up to the last step was told."""


class NoObserver:
    """Tells nobody."""

    def steps(self, lines: list[StepLine]) -> None:
        pass

    def event(self, row: dict[str, Any], warning: str | None = None) -> None:
        pass

    def epoch(self, epoch: Epoch) -> None:
        pass

    def checkpoint(self) -> None:
        pass
