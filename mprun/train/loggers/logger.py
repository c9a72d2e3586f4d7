"""The interface of a logger, and what all of them have in common.

The events of a run become scalars: a value of a named curve at an optimizer step. Scalars wait for
at most `WRITE_EVERY_S` and are written together, because a tracker takes milliseconds per call. All
is written when an epoch, a checkpoint, the test or the training ends.

What a tracker is given of a run, as plain values: mprun's own run, or a loop it observes.

Trackers print, log and warn while they work; a run's output has none of it.
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
from mprun.records.run_folder import RECORD_FILES, TRACKERS
from mprun.records.run_record import Epoch, Scores, Status, Summary, number
from mprun.train.callbacks import Callback, StepLine

Scalar = str | int | float | bool | None

STORE = "outputs"
STORE_LEVELS = 3
"""outputs/DATE/TIME/TRIAL: the folders above the run of a study."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run as a tracker sees it."""

    folder: Path
    """The run's folder, with its record."""
    project: str = "mprun"
    """MLflow's experiment; the project of W&B and trackio."""
    name: str = "run"
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, nested."""
    tags: Mapping[str, str] = field(default_factory=dict)
    store: Path | None = None
    """The folder of the tracker's files; None for `outputs`, else the run's parent."""
    uri: str | None = None
    """MLflow's store; None for MLFLOW_TRACKING_URI, else a file in `store_folder`."""
    online: bool = False
    """Whether W&B sends the data to its server while the run trains."""
    first_step: int | None = None
    """Of a resumed run; None for a new one."""
    log_every: int = 1
    """Every n-th step is logged, and each skipped one, as in metrics.jsonl."""

    @property
    def store_folder(self) -> Path:
        """One folder for the tracker's files of many runs."""
        if self.store is not None:
            return self.store
        above = list(self.folder.absolute().parents)
        return next((p for p in above[:STORE_LEVELS] if p.name == STORE), above[0])

    @property
    def tracker_folder(self) -> Path:
        """The folder for copies of records: nothing searches it for runs."""
        return self.store_folder / TRACKERS

    @property
    def parameters(self) -> dict[str, Scalar]:
        """The configuration with dotted names: `train.lr`.

        A list is one value, as JSON, and so is a mapping whose keys are not plain names (modules
        by glob, for example): trackers refuse such names.
        """
        return dict(_flattened(self.configuration))


def _flattened(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and all(map(_is_plain, value)):
            yield from _flattened(value, f"{name}.")
        elif value is None or isinstance(value, str | int | float):
            yield name, value
        else:
            yield name, json.dumps(value)


def _is_plain(key: object) -> bool:
    return isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_-]+", key) is not None


def run_tags(summary: Summary) -> dict[str, str]:
    """The facts that runs are searched by; their names are `OWN_TAGS`, without `status`."""
    return {
        "recipe": summary.recipe,
        "precision": summary.precision,
        "variant": summary.variant,
        "variant_hash": summary.variant_hash,
        "seed": str(summary.seed),
        "execution": summary.execution,
        "device": summary.hardware.device,
        "hardware": summary.hardware.name,
        "mprun_version": summary.mprun_version,
        "git_commit": summary.git_commit or "unknown",
    }


def summary_scalars(summary: Summary) -> dict[str, float]:
    """The figures of the whole run, without those that do not apply."""
    figures = {
        "summary/step_time_ms": summary.step_time_ms.median,
        "summary/data_time_ms": summary.data_time_ms.median,
        "summary/samples_per_second": summary.samples_per_second,
        "summary/peak_memory_bytes": summary.memory_bytes.peak,
        "summary/allocator_peak_bytes": summary.memory_bytes.allocator_peak,
        "summary/skipped_steps": summary.skipped_steps,
        "summary/wall_time_s": summary.wall_time_s,
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing is printed, logged below an error, or warned about."""
    before, nowhere = logging.root.manager.disable, io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Inside, these environment variables are set, except those that the user has set."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


Tell = Callable[[str], None]
MAX_ROWS = 1000


def ignore(text: str) -> None:
    """Show a line to nobody."""


class LoggedRow(NamedTuple):
    """The scalars of one step."""

    step: int
    time_s: float
    """Seconds since 1970."""
    values: dict[str, float]


class Logger(Callback, ABC):
    """Writes a run's scalars, configuration, tags and files somewhere else.

    A subclass implements `begin`, `write`, `upload` and `end`. Each may raise anything: the first
    exception is reported in one warning and ends the logging, never the training.

    Args:
        run: what is known of the run.
        warn: called with a sentence when the logger fails.
        report: called with a line for the user.
    """

    NAME: ClassVar[str]
    """Its option of the group `logger`."""
    TITLE: ClassVar[str]
    MODULE: ClassVar[str]
    """What has to be imported."""
    PACKAGE: ClassVar[str | None] = None
    """What pip installs for it; None: mprun's extra `NAME`."""
    FIELDS: ClassVar[tuple[str, ...]] = ("project", "run_name", "tags")
    """The fields of the group `logger` that it uses."""
    WRITE_EVERY_S: ClassVar[float] = 2.0
    HAS_RUNS: ClassVar[bool] = True
    """Whether it keeps runs with files; a resumed run continues its own, by logger.json."""

    def __init__(self, run: LoggedRun, warn: Tell = ignore, report: Tell = ignore) -> None:
        self.run = run
        self._warn, self._report = warn, report
        self._rows: list[LoggedRow] = []
        self._record = LoggerRecord(logger=self.NAME, id="")
        self._written_at = time.perf_counter()
        self._is_open = self._failed = False

    @classmethod
    def check(cls, online: bool = False) -> None:
        """Raise `UsageError` unless the package can be imported.

        Args:
            online: whether it is to send its data away.
        """
        try:
            cls.load()
        except Exception as error:  # not installed, or in conflict with another package
            raise UsageError(
                f"logger={cls.NAME} needs {cls.TITLE}, which cannot be imported "
                f"({first_line(error)}); pip install '{cls.PACKAGE or f'mprun[{cls.NAME}]'}'"
            ) from None

    @classmethod
    def load(cls) -> Any:
        """The package, imported."""
        return importlib.import_module(cls.MODULE)

    # ---- what a subclass does --------------------------------------------------------------------

    @abstractmethod
    def begin(self, earlier: str | None) -> str:
        """Begin the tracker's run, with configuration and tags.

        Args:
            earlier: the id of the run to continue if it still exists, or None.

        Returns:
            The run's id.
        """

    @abstractmethod
    def write(self, rows: Sequence[LoggedRow]) -> None:
        """Write rows, in the order of their steps."""

    def upload(self, files: Sequence[Path]) -> None:
        """Keep copies of these files with the run."""

    @abstractmethod
    def end(self, status: Status) -> None:
        """End the tracker's run with a status."""

    def address(self) -> str | None:
        """How to look at the run, in one line, or None."""
        return None

    # ---- for any loop ----------------------------------------------------------------------------

    def open(self) -> None:
        """Begin the tracker's run, unless it has begun."""
        if self._is_open or self._failed:
            return
        self._is_open = True
        if self._guarded(self._begin) and (text := self.address()) is not None:
            self._report(f"note: {text}")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log values at a step; a curve never gets a step that it has."""
        last = self._record.last_steps
        new = {name: value for name, value in values.items() if step > last.get(name, -1)}
        if new:
            last.update(dict.fromkeys(new, step))
            self._rows.append(LoggedRow(step, time.time(), new))

    def artifacts(self, files: Sequence[Path]) -> None:
        """Keep copies of files; call it when they are complete."""
        self.flush()
        if self._is_open and not self._failed and files:
            self._guarded(lambda: self.upload(files))

    def flush(self) -> None:
        """Write all scalars so far."""
        self.open()
        rows, self._rows = self._rows, []
        if rows and not self._failed:
            self._guarded(lambda: self._write(rows))
        self._written_at = time.perf_counter()

    def finish(self, status: Status) -> None:
        """End the tracker's run, if it has begun; `running` stands for a run that was stopped."""
        if not self._is_open:
            return
        self._is_open = False
        ended: Status = "interrupted" if status == "running" else status
        if self._failed:  # one more try, so that the tracker does not wait for ever
            with contextlib.suppress(Exception), quiet():
                self.end(ended)
        else:
            self._guarded(lambda: self.end(ended))

    def finish_run(self, summary: Summary) -> None:
        """Log the figures and files of a record that is complete, and end the tracker's run."""
        if not self._is_open:
            return
        self.scalars(summary_scalars(summary), summary.steps)
        files = [self.run.folder / name for name in RECORD_FILES]
        self.artifacts([path for path in files if path.is_file()])
        self.finish(summary.status)

    def _begin(self) -> None:
        folder = self.run.folder
        earlier = read_logger_record(folder, self.NAME) if self.HAS_RUNS else None
        self._record.id = self.begin(None if earlier is None else earlier.id)
        if earlier is not None and earlier.id == self._record.id:
            self._record.last_steps = earlier.last_steps
        self._keep()

    def _write(self, rows: list[LoggedRow]) -> None:
        self.write(rows)
        self._keep()

    def _keep(self) -> None:
        if self.HAS_RUNS:
            write_logger_record(self.run.folder, self._record)

    def _guarded(self, action: Callable[[], None]) -> bool:
        """Carry out an action silently; False, and a warning, if it fails."""
        try:
            with quiet():
                action()
        except Exception as error:
            self._failed = True
            self._warn(
                f"logger={self.NAME} failed and is off from here on ({type(error).__name__}: "
                f"{first_line(error)}); the run and its record go on"
            )
        return not self._failed

    # ---- a run of mprun --------------------------------------------------------------------------

    def on_train_start(self, model: nn.Module, elapsed_s: float) -> None:
        self.open()

    def on_steps(self, lines: list[StepLine]) -> None:
        self.open()
        for line in lines:
            if line.step % self.run.log_every == 0 or line.skipped:
                self.scalars(_step_scalars(line), line.step)
        waited = time.perf_counter() - self._written_at
        if waited >= self.WRITE_EVERY_S or len(self._rows) >= MAX_ROWS:
            self.flush()

    def on_epoch_end(self, epoch: Epoch, step: int) -> None:
        train = _named("train/epoch_", epoch.train)
        self.scalars({**train, **_named("validation/", epoch.validation)}, step)
        self.flush()

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        self.flush()

    def on_test(self, scores: Scores, step: int) -> None:
        self.scalars(_named("test/", scores), step)
        self.flush()

    def on_end(self, status: Status) -> None:
        self.flush()


def _step_scalars(line: StepLine) -> dict[str, float]:
    return {
        "train/loss": line.loss,
        **{f"train/loss.{name}": part for name, part in line.parts.items()},
        "train/lr": line.lr,
        "train/loss_scale": line.loss_scale,
        "time/step_ms": line.step_time_ms,
        "time/data_ms": line.data_time_ms,
    }


def _named(prefix: str, scores: Scores) -> dict[str, float]:
    """The scores that apply, by their curves: `validation/loss`, `train/epoch_accuracy`, ..."""
    return {prefix + name: number(value) for name, value in scores.named.items()}
