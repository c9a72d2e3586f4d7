"""The files of an observed training: lines, summary, report.

A full disk ends the record, never the training.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from torch import Tensor

from mprun.errors import UsageError
from mprun.integrations.last_part import LastPart, last_steps
from mprun.integrations.logged_values import Means, as_number, scores_of
from mprun.records.epoch_lines import epoch_lines
from mprun.records.files import write_atomic
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import Epoch, Scores, Summary, TrainScore, metric_rows
from mprun.train.callbacks import StepLine
from mprun.train.clock import StepTime
from mprun.train.conditions_recorder import ConditionsRecorder
from mprun.train.epoch_history import EpochHistory
from mprun.train.step_statistics import StepStatistics
from mprun.train.stopwatch import Stopwatch

logger = logging.getLogger("mprun")

REPORT = "report.txt"


@dataclass
class ObservedStep:
    """One step, while it is taken and until it is written."""

    step: int
    lr: float = 0.0
    loss_scale: float = 1.0
    skipped: bool = False
    data_time_ms: float | None = None
    """None after an evaluation, whose time cannot be told from the wait."""
    calls: int = 0
    """Of the model: one for each micro-batch."""
    samples: int = 0
    timed: bool = True
    values: dict[str, Tensor | float] = field(default_factory=dict)
    """What the loop logged for it."""
    finite: list[Tensor | bool] = field(default_factory=list)
    """Whether each loss that went backward is finite."""


class ObservedRecord:
    """Writes the record.

    Args:
        path: the folder.
        summary: updated with every step.
        watch: counts the seconds.

    Raises:
        FileExistsError: the folder has a run.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, summary: Summary, watch: Stopwatch) -> None:
        if (path / "summary.json").exists():
            raise FileExistsError(f"out={path} already contains a run; choose another folder")
        try:
            self._folder = RunFolder(path)
        except UsageError as error:
            raise OSError(str(error).replace("run.dir=", "out=")) from None
        self.path = path
        self._summary, self._watch = summary, watch
        self._statistics = StepStatistics()
        self._conditions = ConditionsRecorder(summary)
        self._history = EpochHistory(summary.metric)
        self._means, self._last_part = Means(), LastPart()
        self._broken = False

    def config(self, content: dict[str, Any]) -> None:
        """Write config.yaml."""
        self._write(lambda: self._folder.config(yaml.safe_dump(content, sort_keys=False)))

    def summary(self) -> None:
        """Write summary.json."""
        self._write(lambda: self._folder.summary(self._summary))

    def event(self, row: dict[str, Any]) -> None:
        """Write a line of something that happened."""
        self._write(lambda: self._folder.lines([{"kind": "event", **row}]))

    def report(self, text: str) -> None:
        """Write the report."""
        self._write(lambda: write_atomic(self.path / REPORT, f"{text}\n".encode()))

    def steps(self, steps: list[ObservedStep], times: list[StepTime]) -> None:
        """Write steps that are complete."""
        summary, rows, lines = self._summary, [], []
        for step, time in zip(steps, times, strict=True):
            values = {name: as_number(value) for name, value in step.values.items()}
            loss = values.get("loss")
            if not step.skipped:
                self._means.add(step.step, values)
            known = loss if all(map(bool, step.finite)) else nan
            self._last_part.add(step.step, known, step.skipped)
            if step.timed:
                self._statistics.add(time.ms, step.data_time_ms, time.page_faults)
            lines.append(_step_line(step, time, len(self._history.epochs()) + 1))
            row = {"kind": "step", **lines[-1]._asdict(), "loss": loss}
            row["data_time_ms"] = step.data_time_ms
            del row["timed"], row["page_faults"], row["parts"]
            rows.append({**row, **{k: v for k, v in values.items() if k != "loss"}})
            summary.steps, summary.loss_scale.final = step.step, step.loss_scale
            if step.skipped:
                summary.skipped_steps += 1
                rows.append({"kind": "event", "event": "skipped_step", "step": step.step})
        if lines:
            self._conditions.on_steps(lines)
            self._write(lambda: self._folder.lines(rows))

    def validation(self, values: dict[str, float]) -> None:
        """The model was validated after the last step."""
        last = self._history.last
        epoch = Epoch(
            epoch=1 if last is None else last.epoch + 1,
            train=self._means.take(),
            validation=scores_of(values),
        )
        self._add(epoch)
        self._summary.train = TrainScore(loss=epoch.train.loss)

    def _without_validation(self) -> None:
        """The training ended without a validation: its last part is what it is judged by."""
        steps = self._summary.steps
        last = last_steps(steps)
        train = self._means.take(after=steps - last)
        self._add(Epoch(epoch=1, train=train, validation=scores_of({})))
        self._summary.train = TrainScore(loss=train.loss, last_steps=last)

    def _add(self, epoch: Epoch) -> None:
        self._history.add(epoch)
        self._summary.epochs = epoch.epoch
        self._write(lambda: self._folder.lines(epoch_lines(epoch, self._summary.steps)))

    def failure(self) -> str:
        """Why the model does not train at the end; empty if it does."""
        return self._last_part.failure()

    def test(self, values: dict[str, float]) -> None:
        """The model was tested."""
        self._summary.test = Scores(**{**vars(self._summary.test), **_known(scores_of(values))})

    def close(self) -> None:
        """Write the last figures."""
        summary, statistics = self._summary, self._statistics
        if self._history.last is None:
            self._without_validation()
        summary.wall_time_s, summary.time_budget_s = self._watch.read()
        summary.history = self._history.epochs()
        summary.metrics = metric_rows(self._history.last, summary.test)
        summary.step_time_ms = statistics.step_times()
        summary.data_time_ms = statistics.data_times()
        summary.page_faults_per_step = statistics.page_faults_per_step()
        if summary.batch_size:
            summary.samples_per_second = statistics.samples_per_second(summary.batch_size)
        self._conditions.on_end(summary.status)
        self.summary()
        with contextlib.suppress(OSError):
            self._folder.close()

    def _write(self, write: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            write()
        except OSError as error:
            self._broken = True
            logger.warning("the record in %s ends here: %s", self.path, error.strerror or error)


def _step_line(step: ObservedStep, time: StepTime, epoch: int) -> StepLine:
    return StepLine(
        step=step.step,
        epoch=epoch,
        loss=0.0,
        lr=step.lr,
        loss_scale=step.loss_scale,
        skipped=step.skipped,
        step_time_ms=time.ms,
        data_time_ms=step.data_time_ms or 0.0,
        timed=step.timed,
        page_faults=time.page_faults,
    )


def _known(scores: Scores) -> dict[str, Any]:
    return {name: value for name, value in vars(scores).items() if value is not None}
