"""A run's progress on screen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from mprun.console import Moment, ProgressView
from mprun.records.run_record import Epoch, Status, Summary, number
from mprun.train.callbacks import Callback, StepLine

FEW_EPOCHS = 20
SHOW_EPOCH_EVERY_S = 1.0
"""After the first few, epochs are shown at most this often: a run may have hundreds."""


class Progress(Callback):
    """Shows how far a run is.

    Args:
        view: where it is shown.
        planned_steps: optimizer steps if time does not run out, or None.
        max_time_s: the limit on training time in seconds, or None.
    """

    def __init__(
        self, view: ProgressView, planned_steps: int | None, max_time_s: float | None
    ) -> None:
        self._view, self._planned_steps, self._max_time_s = view, planned_steps, max_time_s
        self._began = time.perf_counter()
        self._shown_at = 0.0
        self._judged_by = "accuracy"

    def on_start(self, summary: Summary, folder: Path) -> None:
        self._judged_by = summary.metric.name

    def on_train_start(self, model: nn.Module, elapsed_s: float) -> None:
        self._began = time.perf_counter() - elapsed_s
        self._view.start()

    def on_steps(self, lines: list[StepLine]) -> None:
        last, elapsed_s = lines[-1], time.perf_counter() - self._began
        by_steps = last.step / self._planned_steps if self._planned_steps else 0.0
        by_time = elapsed_s / self._max_time_s if self._max_time_s else 0.0
        done = min(1.0, max(by_steps, by_time))
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
                text += f"  {name} {score} {number(value):.4f}"
        if scores is epoch.validation and scores.samples is not None:
            text += f" (PARTIAL: the first {scores.samples:,} samples)"
    return text
