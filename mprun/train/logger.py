"""A logger: a callback that writes the scalars of a run somewhere else.

A scalar is a value of a named curve at an optimizer step. Scalars wait for at most `WRITE_EVERY_S`
and are written together. All is written when an epoch, a checkpoint, the test or the training ends.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import re
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import nn

from mprun.errors import UsageError, first_line
from mprun.records.run_config import LoggerRecord, read_logger_record, write_logger_record
from mprun.records.run_folder import TRACKERS
from mprun.records.run_record import AveragedScores, Epoch, Scores, Status, Summary
from mprun.train.callbacks import Callback, StepLine

Scalar = str | int | float | bool | None

STORE = "outputs"  # The folder of all runs, unless the user names another
PLAIN = re.compile("[A-Za-z0-9_-]+")  # A key that trackers take as a part of a dotted name
STORE_LEVELS = 3  # outputs/DATE/TIME/TRIAL: the folders above the run of a study


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run as a tracker sees it."""

    folder: Path  # The run's folder, with its record
    project: str = "mprun"  # MLflow's experiment; the project of W&B
    name: str = "run"
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, nested."""
    tags: Mapping[str, str] = field(default_factory=dict)
    uri: str | None = None
    """MLflow's store; None for MLFLOW_TRACKING_URI, else a file in `store_folder`."""
    online: bool = False  # Whether W&B sends the data to its server while the run trains
    first_step: int | None = None  # Of a resumed run; None for a new one
    log_every: int = 1  # Every n-th step is logged, and each skipped one, as in metrics.jsonl

    @property
    def store_folder(self) -> Path:
        """One folder for the tracker's files of many runs: `outputs`, else the run's parent."""
        above = list(self.folder.absolute().parents)
        return next((p for p in above[:STORE_LEVELS] if p.name == STORE), above[0])

    @property
    def tracker_folder(self) -> Path:
        """The folder of a tracker with a folder for each run: nothing searches it for runs."""
        return self.store_folder / TRACKERS

    @property
    def parameters(self) -> dict[str, Scalar]:
        """The configuration with dotted names: `train.lr`.

        A list is one value, as JSON, and so is a mapping whose keys are not plain names (modules
        by glob, for example): trackers refuse such names.
        """
        return dict(_flattened(self.configuration))

    @property
    def described(self) -> dict[str, Scalar]:
        """Parameters and tags in one mapping, for trackers whose configuration holds both."""
        return {**self.parameters, **{f"tags.{name}": value for name, value in self.tags.items()}}


def _flattened(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        is_plain = isinstance(value, Mapping) and all(
            isinstance(x, str) and PLAIN.fullmatch(x) for x in value
        )
        if is_plain and value:
            yield from _flattened(value, f"{name}.")
        elif value is None or isinstance(value, str | int | float):
            yield name, value
        else:
            yield name, json.dumps(value)


def run_tags(summary: Summary) -> dict[str, str]:
    """The facts that runs are searched by; their names are `OWN_TAGS`, without `status`."""
    own = ("recipe", "precision", "variant", "variant_hash", "seed", "execution", "mprun_version")
    return {
        **{name: str(getattr(summary, name)) for name in own},
        "device": summary.hardware.device,
        "hardware": summary.hardware.name,
        "git_commit": summary.git_commit or "unknown",
    }


def summary_scalars(summary: Summary) -> dict[str, float]:
    """The figures of the whole run, without those that do not apply."""
    figures = {
        "step_time_ms": summary.step_time_ms.median,
        "data_time_ms": summary.data_time_ms.median,
        "samples_per_second": summary.samples_per_second,
        "peak_memory_bytes": summary.memory_bytes.peak,
        "allocator_peak_bytes": summary.memory_bytes.allocator_peak,
        "skipped_steps": summary.skipped_steps,
        "wall_time_s": summary.wall_time_s,
    }
    return {f"summary/{name}": float(x) for name, x in figures.items() if x is not None}


def _score_scalars(prefix: str, scores: Scores) -> dict[str, float]:
    """The scores that apply, by their curves: `validation/loss`, `train/epoch_accuracy`, ..."""
    return {prefix + name: float(value) for name, value in scores.named.items()}


@contextlib.contextmanager
def quiet(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, nothing is printed, warned about or logged below an error, as trackers do.

    These environment variables are set, except those that the user has set.
    """
    # the global switch: trackers have many loggers, and set levels of their own
    logged, nowhere = logging.root.manager.disable, io.StringIO()
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logged)
        for name in missing:
            os.environ.pop(name, None)


class LoggedRow(NamedTuple):
    """The scalars of one step."""

    step: int
    time_s: float  # Seconds since 1970
    values: dict[str, float]


Tell = Callable[[str], None]


def ignore(text: str) -> None:
    """Show nothing."""


class Logger(Callback, ABC):
    """Writes a run's scalars, configuration and tags somewhere else.

    A subclass implements `begin`, `write` and `end`. Each may raise anything: the first
    exception is reported by `warn` and ends the logging, never the training. `report` shows a line.
    """

    NAME: ClassVar[str]  # Its option of the group `logger`, and mprun's extra that installs it
    TITLE: ClassVar[str]
    MODULE: ClassVar[str]  # What has to be imported
    FIELDS: ClassVar[tuple[str, ...]] = ("project", "run_name", "tags")
    """The fields of the group `logger` that it uses."""
    VARIABLES: ClassVar[Mapping[str, str]] = {}
    """Environment variables while the tracker works, unless the user has set them."""
    FOLDERS: ClassVar[Mapping[str, str]] = {}
    """Variables that name folders, below the run's `tracker_folder`."""
    # A tracker takes milliseconds per call. A thread that writes during a step adds to its time.
    WRITE_EVERY_S: ClassVar[float] = 2.0
    HAS_RUNS: ClassVar[bool] = True
    """Whether it keeps runs; a resumed run continues its own, by logger.json."""

    def __init__(self, run: LoggedRun, warn: Tell = ignore, report: Tell = ignore) -> None:
        self.run, self._warn, self._report = run, warn, report
        self._rows: list[LoggedRow] = []
        self._record = LoggerRecord(logger=self.NAME, id="")
        self._written_at = time.perf_counter()
        self._is_open = self._failed = False

    @classmethod
    def check(cls, online: bool = False) -> None:
        """Raise `UsageError` unless the package can be imported (and may send data, if online)."""
        try:
            with quiet(cls.VARIABLES):
                cls.load()
        except Exception as error:  # not installed, or in conflict with another package
            raise UsageError(
                f"logger={cls.NAME} needs {cls.TITLE}, which cannot be imported "
                f"({first_line(error)}); pip install 'mprun[{cls.NAME}]'"
            ) from None

    @classmethod
    def load(cls) -> Any:
        """The package, imported."""
        return importlib.import_module(cls.MODULE)

    @abstractmethod
    def begin(self, earlier: str | None) -> str:
        """Begin the tracker's run, or continue the one with the id `earlier`; returns the id."""

    @abstractmethod
    def write(self, rows: Sequence[LoggedRow]) -> None:
        """Write rows, in the order of their steps."""

    @abstractmethod
    def end(self, status: Status) -> None:
        """End the tracker's run with a status."""

    def address(self) -> str | None:
        """How to look at the run, in one line, or None."""
        return None

    def open(self) -> None:
        """Begin the tracker's run, unless it has begun."""
        if self._is_open or self._failed:
            return
        self._is_open = True
        self._guarded(self._begin)
        if not self._failed and (text := self.address()) is not None:
            self._report(f"note: {text}")

    def _begin(self) -> None:
        earlier = read_logger_record(self.run.folder, self.NAME) if self.HAS_RUNS else None
        self._record.id = self.begin(None if earlier is None else earlier.id)
        if earlier is not None and earlier.id == self._record.id:
            self._record.last_steps = earlier.last_steps  # else a new run, which gets every step
        self._write_record()

    def _write_record(self) -> None:
        if self.HAS_RUNS:
            write_logger_record(self.run.folder, self._record)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log values at a step; a curve never gets a step that it has."""
        last = self._record.last_steps
        # a resumed run takes steps again that it had logged before it was killed
        new = {name: value for name, value in values.items() if step > last.get(name, -1)}
        if new:
            last.update(dict.fromkeys(new, step))
            self._rows.append(LoggedRow(step, time.time(), new))

    def flush(self) -> None:
        """Write all scalars so far."""
        self.open()
        rows, self._rows = self._rows, []
        if rows and not self._failed:
            self._guarded(self._write, rows)
        self._written_at = time.perf_counter()

    def _write(self, rows: Sequence[LoggedRow]) -> None:
        self.write(rows)
        self._write_record()

    def finish(self, status: Status) -> None:
        """End the tracker's run, if it has begun.

        The status `running` stands for a run that was stopped.
        """
        if not self._is_open:
            return
        self.flush()
        self._is_open = False
        # after a failure too: some trackers wait for their end for ever
        self._guarded(self.end, "interrupted" if status == "running" else status)

    def finish_run(self, summary: Summary) -> None:
        """Log the figures of a record that is complete, and end the tracker's run."""
        if self._is_open:
            self.scalars(summary_scalars(summary), summary.steps)
            self.finish(summary.status)

    def _guarded(self, action: Callable[..., None], *args: Any) -> None:
        """Carry out an action silently; the first one that fails is one warning."""
        folders = {k: str(self.run.tracker_folder / part) for k, part in self.FOLDERS.items()}
        try:
            with quiet({**self.VARIABLES, **folders}):
                action(*args)
        except Exception as error:
            if not self._failed:
                self._warn(
                    f"logger={self.NAME} failed and is off from here on "
                    f"({type(error).__name__}: {first_line(error)}); the run and its record go on"
                )
            self._failed = True

    def on_train_start(self, model: nn.Module, elapsed_s: float) -> None:
        self.open()

    def on_steps(self, lines: list[StepLine]) -> None:
        for line in lines:
            if line.step % self.run.log_every == 0 or line.skipped:
                values = {
                    "train/loss": line.loss,
                    **{f"train/loss.{name}": part for name, part in line.parts.items()},
                    "train/lr": line.lr,
                    "train/loss_scale": line.loss_scale,
                    "time/step_ms": line.step_time_ms,
                }
                if line.data_time_ms is not None:
                    values["time/data_ms"] = line.data_time_ms
                self.scalars(values, line.step)
        if time.perf_counter() - self._written_at >= self.WRITE_EVERY_S:
            self.flush()

    def on_validation(self, scores: Scores, step: int, epoch: int) -> None:
        self.scalars(_score_scalars("validation/", scores), step)

    def on_epoch_end(self, epoch: Epoch, step: int) -> None:
        train = _score_scalars("train/epoch_", epoch.train)
        self.scalars({**train, **_score_scalars("validation/", epoch.validation)}, step)
        self.flush()

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        # before the checkpoint is written: a run resumed from it logs no step twice
        self.flush()

    def on_test(self, scores: Scores, step: int) -> None:
        self.scalars(_score_scalars("test/", scores), step)
        self.flush()

    def on_averaged(self, scores: AveragedScores, step: int) -> None:
        validation = _score_scalars("averaged/validation_", scores.validation)
        self.scalars({**validation, **_score_scalars("averaged/test_", scores.test)}, step)

    def on_end(self, status: Status) -> None:
        self.flush()
