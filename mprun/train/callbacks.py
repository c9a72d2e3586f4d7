"""Events of a run, and the callbacks that are notified of them.

The loop (`Trainer`) and `mprun.run` emit events. Callbacks record, show and log them and save
checkpoints. They are called in the order of their list, between two steps, so that their time is
not part of a step's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from mprun.records.run_record import Epoch, Scores, Status, Summary


class StepLine(NamedTuple):
    """One optimizer step."""

    step: int
    epoch: int
    loss: float
    lr: float
    loss_scale: float
    skipped: bool
    step_time_ms: float
    data_time_ms: float
    timed: bool
    """Whether it is part of the statistics: its batch has the full size."""
    page_faults: int | None = None
    parts: Mapping[str, float] = MappingProxyType({})
    """The named parts of the loss."""


class Callback:
    """Notified of a run's events. Every method does nothing until a subclass overrides it."""

    def on_start(self, summary: Summary, folder: Path) -> None:
        """The run has its folder and its first summary; its model is built, unless that failed."""

    def on_message(self, text: str) -> None:
        """A note or a warning for the user."""

    def on_train_start(self, model: nn.Module, elapsed_s: float) -> None:
        """Called before the first step.

        Args:
            model: the prepared model.
            elapsed_s: seconds the run took before it was resumed, without start-up; 0 for a new
                run.
        """

    def on_steps(self, lines: list[StepLine]) -> None:
        """Steps were taken since the last call."""

    def on_event(self, row: dict[str, Any], warning: str | None = None) -> None:
        """Something happened in a step. This comes before the call of `on_steps` with that step.

        Args:
            row: the event's line of metrics.jsonl.
            warning: a sentence for the user, or None.
        """

    def on_epoch_end(self, epoch: Epoch, step: int) -> None:
        """An epoch ended with this step, and was validated if there is validation data.

        Without it the end is known at a step of the next epoch, and this comes before the call of
        `on_steps` with that step.
        """

    def on_interrupt(self, scores: Scores) -> None:
        """The run is stopped inside an epoch with these training scores; a checkpoint follows."""

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        """A checkpoint is due; `state` is the loop's, after the last step of `on_steps`."""

    def on_test(self, scores: Scores, step: int) -> None:
        """The model was tested after this step."""

    def on_end(self, status: Status) -> None:
        """Training and test ended or failed. Called once after `on_train_start`."""


class Messages:
    """Messages of a run for its user.

    Args:
        summary: keeps the warnings.
        callbacks: notified of every message.
    """

    def __init__(self, summary: Summary, callbacks: Sequence[Callback]) -> None:
        self._summary, self._callbacks = summary, callbacks

    def report(self, text: str) -> None:
        """Show a line."""
        for callback in self._callbacks:
            callback.on_message(text)

    def warn(self, text: str | None) -> None:
        """Show and record a warning; nothing happens for None."""
        if text is not None:
            self.report(f"warning: {text}")
            if text not in self._summary.warnings:
                self._summary.warnings.append(text)
