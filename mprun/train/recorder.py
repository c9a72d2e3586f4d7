"""The journal of a run: what the loop tells goes to the record, to the screen and to a logger.

It keeps the summary true while the run goes, and its own state in checkpoints, so that the figures
of a resumed run are those of the whole run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from mprun.assemble import Plan
from mprun.console import Moment, ProgressView
from mprun.precision.arithmetic import Arithmetic, occurred_substitutions
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import (
    Epoch,
    LossScaleRow,
    Scores,
    Status,
    Substitution,
    Summary,
    TrainScore,
)
from mprun.train.callbacks import StepLine
from mprun.train.clock import StepStatistics
from mprun.train.loggers import Logger

WRITE_SUMMARY_EVERY_S = 1.0
FEW_EPOCHS = 20
SHOW_EPOCH_EVERY_S = 1.0
"""Beyond the first few, epochs are shown at most this often: a recipe may have hundreds."""


class Journal:
    """Is told what happens, and keeps it.

    Args:
        chosen: the plan.
        summary: the summary to keep true.
        folder: the run's folder.
        view: where progress is shown.
        logger: the further sink for scalars.
        planned_steps: optimizer steps if time does not run out, or None.
        save: writes a checkpoint.
        arithmetic: the run's, which knows what it substituted.
    """

    def __init__(
        self,
        chosen: Plan,
        summary: Summary,
        folder: RunFolder,
        view: ProgressView,
        logger: Logger,
        planned_steps: int | None,
        save: Callable[[], None],
        arithmetic: Arithmetic,
    ) -> None:
        self.summary = summary
        self.losses: list[float] = []
        self._plan, self._folder, self._view, self._logger = chosen, folder, view, logger
        self._planned, self.checkpoint = planned_steps, save
        self._arithmetic = arithmetic
        self._substituted: list[Substitution] = []  # before the run was resumed
        self._statistics = StepStatistics()
        self._began = self._written_at = time.perf_counter()
        self._elapsed_before_s = 0.0
        self._shown_at = 0.0
        self._times = summary.fp_exceptions is None  # looking at each op takes its time
        self._events: list[dict[str, Any]] = []

    @property
    def elapsed_s(self) -> float:
        """Seconds the run has taken, before it was resumed too."""
        return self._elapsed_before_s + time.perf_counter() - self._began

    def steps(self, lines: list[StepLine]) -> None:
        """Steps were taken."""
        summary, every = self.summary, self._plan.config.train.log_every
        for line in lines:
            if line.timed and self._times:
                self._statistics.add(line.step_time_ms, line.data_time_ms)
        self.losses += [x.loss for x in lines]
        last = lines[-1]
        summary.steps, summary.epochs = last.step, last.epoch
        summary.skipped_steps += sum(x.skipped for x in lines)
        summary.loss_scale.final = last.loss_scale
        rows = [_step_row(x) for x in lines if x.step % every == 0 or x.skipped]
        rows += [_skip_row(x) for x in lines if x.skipped]
        rows += self._events
        self._events = []
        self._folder.lines(sorted(rows, key=lambda row: int(row["step"])))
        self._logger.steps(lines)
        self._view.update(self._moment(last))

    def event(self, row: dict[str, Any], warning: str | None = None) -> None:
        """Something happened in a step; the row is written with the step's."""
        self._events.append(row)
        if warning is not None:
            self._view.line(f"warning: {warning}")

    def _moment(self, line: StepLine) -> Moment:
        limit_s = self._plan.config.train.max_time_s
        by_steps = line.step / self._planned if self._planned else 0.0
        by_time = self.elapsed_s / limit_s if limit_s else 0.0
        done = min(1.0, max(by_steps, by_time))
        return Moment(line.epoch, line.step, line.loss, line.step_time_ms, done, self.elapsed_s)

    def epoch(self, epoch: Epoch) -> None:
        """An epoch ended."""
        self.summary.history.append(epoch)
        self.summary.train = TrainScore(loss=epoch.train.loss)
        step, now = self.summary.steps, time.perf_counter()
        if epoch.validation.loss is not None:
            line = {"kind": "validation", "step": step, "epoch": epoch.epoch}
            self._folder.lines([{**line, **vars(epoch.validation)}])
        self._logger.epoch(epoch, step)
        if epoch.epoch <= FEW_EPOCHS or now - self._shown_at > SHOW_EPOCH_EVERY_S:
            self._shown_at = now
            self._view.line(_epoch_text(epoch))
        if now - self._written_at > WRITE_SUMMARY_EVERY_S:
            self.write()

    def test(self, scores: Scores) -> None:
        """The run was tested."""
        self.summary.test = scores
        self._logger.test(scores, self.summary.steps)

    def write(self) -> None:
        """Bring the summary up to date and write it."""
        summary, statistics = self.summary, self._statistics
        summary.wall_time_s = self.elapsed_s
        summary.step_time_ms = statistics.step_times()
        summary.data_time_ms = statistics.data_times()
        summary.substitutions = self._substitutions()
        summary.samples_per_second = statistics.samples_per_second(summary.batch_size)
        if self._plan.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._plan.device)
            summary.memory_bytes.allocator_peak = peak
        self._folder.summary(summary)
        self._written_at = time.perf_counter()

    def _substitutions(self) -> list[Substitution]:
        """Those that occurred, in this process or before."""
        rows = [Substitution(**x._asdict()) for x in occurred_substitutions(self._arithmetic)]
        return rows + [x for x in self._substituted if x not in rows]

    def finish(self, status: Status, error: str | None = None) -> None:
        """Write what is left, and the last summary."""
        if self._events:  # of a step that was not finished
            self._folder.lines(self._events)
            self._events = []
        self.summary.status, self.summary.error = status, error
        self.write()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the figures so far."""
        return {
            "elapsed_s": self.elapsed_s,
            "losses": self.losses,
            "step_ms": self._statistics.step_ms,
            "data_ms": self._statistics.data_ms,
            "history": [asdict(epoch) for epoch in self.summary.history],
            "train": asdict(self.summary.train),
            "steps": self.summary.steps,
            "epochs": self.summary.epochs,
            "skipped_steps": self.summary.skipped_steps,
            "loss_scale": asdict(self.summary.loss_scale),
            "substitutions": [asdict(x) for x in self._substitutions()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the figures."""
        self._elapsed_before_s, self.losses = state["elapsed_s"], state["losses"]
        self._statistics.step_ms, self._statistics.data_ms = state["step_ms"], state["data_ms"]
        summary = self.summary
        summary.history = [epoch_from(row) for row in state["history"]]
        summary.train = TrainScore(**state["train"])
        summary.steps, summary.epochs = state["steps"], state["epochs"]
        summary.skipped_steps = state["skipped_steps"]
        summary.loss_scale = LossScaleRow(**state["loss_scale"])
        self._substituted = [Substitution(**row) for row in state.get("substitutions", [])]


def epoch_from(row: dict[str, Any]) -> Epoch:
    """An epoch's scores as a checkpoint holds them."""
    return Epoch(
        epoch=row["epoch"],
        train=Scores(**row["train"]),
        validation=Scores(**row["validation"]),
    )


def _step_row(line: StepLine) -> dict[str, Any]:
    row = {"kind": "step", **line._asdict()}
    del row["timed"]
    return row


def _skip_row(line: StepLine) -> dict[str, Any]:
    return {
        "kind": "event",
        "event": "skipped_step",
        "step": line.step,
        "epoch": line.epoch,
        "loss_scale": line.loss_scale,
    }


def _epoch_text(epoch: Epoch) -> str:
    text = f"epoch {epoch.epoch}:"
    parts: list[tuple[str, Scores]] = [
        ("training", epoch.train),
        ("validation", epoch.validation),
    ]
    for name, scores in parts:
        if scores.loss is not None:
            text += f"  {name} loss {float(scores.loss):.4f}"
        if scores.accuracy is not None:
            text += f"  {name} accuracy {scores.accuracy:.4f}"
    return text
