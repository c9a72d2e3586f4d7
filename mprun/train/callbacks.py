"""Events of a run, and the callbacks that are notified of them.

The loop (`Trainer`) and `mprun.run` emit events. Callbacks record, show and log them and save
checkpoints. They are called in the order of their list, between two steps, so that their time is
not part of a step's time. `Progress` is the one that shows them on screen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from mprun.records.console import Moment, ProgressView
from mprun.records.run_record import AveragedScores, Epoch, Scores, Status, Summary

if TYPE_CHECKING:
    from torch import nn


class StepLine(NamedTuple):
    """One optimizer step."""

    step: int
    epoch: int
    loss: float = math.nan  # This and the next fields are read a fraction of a second later
    lr: float = 0.0
    loss_scale: float = 1.0
    skipped: bool = False
    step_time_ms: float = 0.0
    data_time_ms: float | None = 0.0  # None: it is not known
    timed: bool = True  # Whether it is part of the statistics: its batch has the full size
    page_faults: int | None = None
    parts: Mapping[str, float] = MappingProxyType({})  # The named parts of the loss


class Callback:
    """Notified of a run's events. Every method does nothing until a subclass overrides it."""

    def on_start(self, summary: Summary, folder: Path) -> None:
        """The run has its folder and its first summary; its model is built, unless that failed."""

    def on_message(self, text: str) -> None:
        """A note or a warning for the user."""

    def on_train_start(self, model: nn.Module, elapsed_s: float) -> None:
        """Called before the first step, with the prepared model.

        `elapsed_s` is what the run took before it was resumed, without start-up; 0 for a new run.
        """

    def on_steps(self, lines: list[StepLine]) -> None:
        """Steps were taken since the last call."""

    def on_event(self, row: dict[str, Any], warning: str | None = None) -> None:
        """Something happened in a step. This comes before the call of `on_steps` with that step.

        `row` is the event's line of metrics.jsonl, `warning` a sentence for the user.
        """

    def on_validation(self, scores: Scores, step: int, epoch: int) -> None:
        """The model was validated inside an epoch, after this step."""

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

    def on_averaged(self, scores: AveragedScores, step: int) -> None:
        """The mean of the weights of steps up to this one was scored."""

    def on_end(self, status: Status) -> None:
        """Training and test ended or failed. Called once after `on_train_start`."""


class Messages:
    """Messages of a run for its user: callbacks show them, the summary has the warnings."""

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
            if text not in self._summary.warnings:  # a resumed run meets those of before
                self._summary.warnings.append(text)


FEW_EPOCHS = 20  # All of a short run are shown
# After the first few, epochs are shown at most this often: a run may have hundreds
SHOW_EPOCH_EVERY_S = 1.0


class Progress(Callback):
    """Shows how far a run is, of its planned steps or its seconds; None is no limit."""

    def __init__(
        self, view: ProgressView, planned_steps: int | None, max_time_s: float | None
    ) -> None:
        self._view, self._planned_steps, self._max_time_s = view, planned_steps, max_time_s
        self._began = time.perf_counter()
        self._shown_at = 0.0
        self._judged_by = "accuracy"  # until `on_start` names the run's metric

    def on_start(self, summary: Summary, folder: Path) -> None:
        self._judged_by = summary.metric.name

    def on_train_start(self, model: nn.Module, elapsed_s: float) -> None:
        self._began = time.perf_counter() - elapsed_s
        self._view.start()

    def on_steps(self, lines: list[StepLine]) -> None:
        last, elapsed_s = lines[-1], time.perf_counter() - self._began
        by_steps = last.step / self._planned_steps if self._planned_steps else 0.0
        by_time = elapsed_s / self._max_time_s if self._max_time_s else 0.0
        done = min(1.0, max(by_steps, by_time))  # the run ends at the first of its limits
        self._view.update(
            Moment(last.epoch, last.step, last.loss, last.step_time_ms, done, elapsed_s)
        )

    def on_event(self, row: dict[str, Any], warning: str | None = None) -> None:
        if warning is not None:
            self._view.line(f"warning: {warning}")

    def on_epoch_end(self, epoch: Epoch, step: int) -> None:
        now = time.perf_counter()
        if epoch.epoch <= FEW_EPOCHS or now - self._shown_at > SHOW_EPOCH_EVERY_S:
            self._shown_at = now
            self._view.line(_epoch_text(epoch, self._judged_by))

    def on_end(self, status: Status) -> None:
        self._view.stop()


def _epoch_text(epoch: Epoch, judged_by: str) -> str:
    """A line on an epoch; of several metrics it has the one that verdicts use."""
    seen = epoch.train.samples
    text = f"epoch {epoch.epoch}{'' if seen is None else f' (cut off after {seen:,} samples)'}:"
    for name, scores in (("training", epoch.train), ("validation", epoch.validation)):
        for score, value in scores.named.items():
            if score in ("loss", "accuracy", judged_by):
                text += f"  {name} {score} {float(value):.4f}"
    return text
