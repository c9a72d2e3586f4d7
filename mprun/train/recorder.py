"""Writes the record of a training: the lines of metrics.jsonl, and the summary.

`Recorder` does it for mprun's own loop and, as its subclass in `train/observe/observed_record.py`,
for anyone's. Its state is part of every checkpoint, so the figures of a resumed run cover the whole
run.

`ExceptionLog` records the floating-point exceptions (fp_exceptions.json). Of several processes,
each knows all exceptions, and all respond alike.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, ClassVar

import msgspec
import torch

from mprun import __version__
from mprun.optim import engines
from mprun.precision import devices
from mprun.precision._torch import compiling_s
from mprun.precision.arithmetic import Arithmetic, occurred_substitutions
from mprun.records.files import write_json
from mprun.records.run_folder import (
    RunFolder,
    epoch_lines,
    read_epochs,
    read_validation_losses,
    score_line,
)
from mprun.records.run_record import (
    SCHEMA_VERSION,
    AveragedScores,
    Conditions,
    DataTimes,
    Epoch,
    FpExceptionsRow,
    LossScaleRow,
    Memory,
    Metric,
    Scores,
    Status,
    StepTimes,
    Substitution,
    Summary,
    TrainScore,
    metric_rows,
)
from mprun.train.callbacks import Callback, StepLine
from mprun.train.clock import StepStatistics, ThinnedSeries, drift
from mprun.train.loss_terms import PREFIX
from mprun.train.machine import machine
from mprun.train.machine.conditions import LoadMeter, clock_mhz
from mprun.train.parallel.ranks import Ranks
from mprun.train.stopwatch import Stopwatch
from mprun.watch.nonfinite import FpException, RunExceptions, StepOutcome, finding_lines

# Of the even choice. `summary.json` is replaced often; `metrics.jsonl` has a line for every epoch.
MAX_EPOCHS = 500


class EpochHistory:
    """Chooses the epochs that a summary shows: all, or of many an even choice and some others.

    `metric` decides which epoch is the best: by its validation, else by its training.
    """

    def __init__(self, metric: Metric, most: int = MAX_EPOCHS) -> None:
        self._metric, self._most = metric, most
        self._even: list[Epoch] = []
        self._stride = 1
        self._first_broken: Epoch | None = None
        """The first one with a loss that is not finite."""
        self._best: Epoch | None = None
        self._best_score = -math.inf
        self.last: Epoch | None = None

    def add(self, epoch: Epoch) -> None:
        """The next epoch; one that was added before is ignored."""
        if self.last is not None and epoch.epoch <= self.last.epoch:
            return
        self.last = epoch
        if (epoch.epoch - 1) % self._stride == 0:  # the first epoch is always one of them
            self._even.append(epoch)
        if len(self._even) > self._most:  # then every second, fourth, eighth ... epoch
            self._stride *= 2
            self._even = [x for x in self._even if (x.epoch - 1) % self._stride == 0]
        losses = (epoch.train.loss, epoch.validation.loss)
        is_broken = any(x is not None and not math.isfinite(float(x)) for x in losses)
        if self._first_broken is None and is_broken:
            self._first_broken = epoch
        if (score := self._score(epoch)) > self._best_score:
            self._best, self._best_score = epoch, score

    def epochs(self) -> list[Epoch]:
        """Those chosen, in order."""
        single = [x for x in (self._first_broken, self._best, self.last) if x is not None]
        chosen = {x.epoch: x for x in (*self._even, *single)}
        return [chosen[epoch] for epoch in sorted(chosen)]

    def _score(self, epoch: Epoch) -> float:
        """The metric, signed so that more is better; minus infinity if there is none."""
        for scores in (epoch.validation, epoch.train):
            value = scores.value(self._metric.name)
            if value is not None:
                score = float(value) if self._metric.higher_is_better else -float(value)
                return score if math.isfinite(score) else -math.inf
        return -math.inf


def new_summary(
    device: torch.device, low: list[str], elapsed_s: float = 0.0, nbytes: int = 0, **known: Any
) -> Summary:
    """The summary before the first step: what was not measured is None, and counts are 0.

    The speed of the formats `low` on this machine is recorded. The training began to start up
    `elapsed_s` ago, and `nbytes` of samples stay in memory. `known` are further fields.
    """
    sizes = ("peak", "parameters", "buffers", "gradients", "optimizer_state", "activations")
    unknown: dict[str, Any] = dict.fromkeys((*sizes, "temporary", "allocator_peak"))
    started_at = datetime.now(timezone.utc) - timedelta(seconds=elapsed_s)
    return Summary(
        schema_version=SCHEMA_VERSION,
        status="running",
        error=None,
        started_at=started_at.isoformat(timespec="milliseconds"),
        mprun_version=__version__,
        git_commit=machine.git_commit(),
        versions=machine.versions(),
        hardware=machine.hardware(device, low),
        substitutions=[],  # none occurred yet
        epochs=0,
        steps=0,
        skipped_steps=0,
        step_time_ms=StepTimes(median=None, p10=None, p90=None, n=0, warmup=0),
        data_time_ms=DataTimes(median=None, p90=None),
        samples_per_second=None,
        wall_time_s=0.0,
        memory_bytes=Memory(data=nbytes, **unknown),
        history=[],
        train=TrainScore(loss=None),
        test=Scores(loss=None, accuracy=None),
        validations=0,
        **known,
    )


WRITE_SUMMARY_EVERY_S = 1.0  # An epoch may take milliseconds, a synced file as many


class Recorder(Callback):
    """Records events in the run's folder and its summary.

    Every n-th step (`log_every`) gets a line in metrics.jsonl, and each skipped one.
    """

    def __init__(
        self,
        summary: Summary,
        folder: RunFolder,
        arithmetic: Arithmetic,
        device: torch.device,
        log_every: int,
        watch: Stopwatch,
    ) -> None:
        self.losses = ThinnedSeries()
        self._summary, self._folder = summary, folder
        self._arithmetic, self._device, self._log_every = arithmetic, device, log_every
        self._substituted: list[Substitution] = []  # before the run was resumed
        self._statistics = StepStatistics()
        self._history = EpochHistory(summary.metric)
        self._watch = watch
        self._written_at = time.perf_counter()
        self._timed = summary.fp_exceptions is None  # the search for exceptions slows every op
        self._events: list[dict[str, Any]] = []
        self._validated_at = 0
        """The step of the last validation inside an epoch."""

    def on_steps(self, lines: list[StepLine]) -> None:
        summary = self._summary
        for line in lines:
            if line.timed and self._timed:
                self._statistics.add(line.step_time_ms, line.data_time_ms, line.page_faults)
            self.losses.add(line.loss)
        last = lines[-1]
        summary.steps, summary.epochs = last.step, last.epoch
        summary.skipped_steps += sum(x.skipped for x in lines)
        summary.loss_scale.final = last.loss_scale
        rows: list[dict[str, Any]] = []
        for x in lines:
            if x.step % self._log_every == 0 or x.skipped:
                rows.append(self._row(x))
            if x.skipped:
                place = {"step": x.step, "epoch": x.epoch, "loss_scale": x.loss_scale}
                rows.append({"kind": "event", "event": "skipped_step", **place})
        self._write(rows)

    def _row(self, line: StepLine) -> dict[str, Any]:
        """The line of a step in metrics.jsonl."""
        row = {"kind": "step", **line._asdict()}
        del row["timed"], row["page_faults"], row["parts"]
        return row | {f"{PREFIX}{name}": part for name, part in line.parts.items()}

    def on_event(self, row: dict[str, Any], warning: str | None = None) -> None:
        self._events.append(row)  # written with the line of its step

    def on_validation(self, scores: Scores, step: int, epoch: int) -> None:
        self._count_validation(scores)
        self._validated_at = step
        self._events.append(score_line("validation", epoch, step, scores))
        self._write([])

    def _count_validation(self, scores: Scores) -> None:
        is_whole = scores.loss is not None and scores.samples is None
        self._summary.validations = (self._summary.validations or 0) + is_whole

    def on_epoch_end(self, epoch: Epoch, step: int) -> None:
        self._history.add(epoch)
        self._summary.train = TrainScore(loss=epoch.train.loss)
        lines = epoch_lines(epoch, step)
        if step == self._validated_at:  # a stream, whose end was not known: its line is written
            lines = lines[-1:]
        else:
            self._count_validation(epoch.validation)
        self._events += lines
        if step <= self._summary.steps:  # else they are written with the lines of its last steps
            self._write([])

    def _write(self, rows: list[dict[str, Any]]) -> None:
        """Write lines and events by step, and the summary if an epoch ended and it is time."""
        rows, self._events = rows + self._events, []
        # stable, so an event follows the line of its step
        self._folder.lines(sorted(rows, key=lambda row: int(row["step"])))
        ended = any(row["kind"] == "epoch" for row in rows)
        if ended and time.perf_counter() - self._written_at > WRITE_SUMMARY_EVERY_S:
            self._update_summary()
            self._folder.summary(self._summary)
            self._written_at = time.perf_counter()

    def on_interrupt(self, scores: Scores) -> None:
        self._summary.train = TrainScore(loss=scores.loss)

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        self._folder.sync()  # the checkpoint relies on the lines up to its step
        for name, value in state.get("process_times", {}).items():
            setattr(self._summary.parallel, name, value)

    def on_test(self, scores: Scores, step: int) -> None:
        self._summary.test = scores

    def on_averaged(self, scores: AveragedScores, step: int) -> None:
        self._summary.averaged = scores

    _earlier_s: ClassVar[float] = 0.0  # Of compiling for the runs that have ended in this process

    def _compiling_s(self) -> float:
        # From the start: memory is counted and kernels are tried before the run
        return compiling_s() + sum(engines.FIRST_LAUNCH_S.values()) - Recorder._earlier_s

    def on_end(self, status: Status) -> None:
        if self._events:  # of a step that was not finished
            with contextlib.suppress(OSError):  # a full disk is reported where the summary is
                self._folder.lines(self._events)
            self._events = []
        self._update_summary()
        Recorder._earlier_s += self._compiling_s()

    def _update_summary(self) -> None:
        summary, statistics = self._summary, self._statistics
        summary.wall_time_s, summary.time_budget_s = self._watch.read()
        summary.history = self._history.epochs()
        summary.metrics = metric_rows(self._history.last, summary.test)
        summary.step_time_ms = statistics.step_times()
        summary.backend.compile_s = self._compiling_s() or None
        summary.data_time_ms = statistics.data_times()
        summary.page_faults_per_step = statistics.page_faults_per_step()
        summary.substitutions = self._substitutions()
        if summary.batch_size:  # 0 in an observed loop before its first step
            summary.samples_per_second = statistics.samples_per_second(summary.batch_size)
        summary.memory_bytes.allocator_peak = devices.peak_bytes(self._device)

    def _substitutions(self) -> list[Substitution]:
        """Substitutions that occurred, in this process or before the run was resumed."""
        rows = [Substitution(**x._asdict()) for x in occurred_substitutions(self._arithmetic)]
        return rows + [x for x in self._substituted if x not in rows]

    def state_dict(self) -> dict[str, Any]:
        """The figures so far, as part of a checkpoint; the epochs are in metrics.jsonl."""
        return {
            **self._watch.state_dict(),
            "loss_series": self.losses.state_dict(),
            "statistics": self._statistics.state_dict(),
            "train": asdict(self._summary.train),
            "steps": self._summary.steps,
            "epochs": self._summary.epochs,
            "skipped_steps": self._summary.skipped_steps,
            "loss_scale": asdict(self._summary.loss_scale),
            "substitutions": [asdict(x) for x in self._substitutions()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the figures."""
        self._watch.resume(state["elapsed_s"], state["time_budget_s"])
        self.losses.load_state_dict(state["loss_series"])
        self._statistics.load_state_dict(state["statistics"])
        for epoch in read_epochs(self._folder.path):
            self._history.add(epoch)
        summary = self._summary
        summary.history = self._history.epochs()
        summary.validations = len(read_validation_losses(self._folder.path))
        summary.train = msgspec.convert(state["train"], TrainScore)
        summary.steps, summary.epochs = state["steps"], state["epochs"]
        summary.skipped_steps = state["skipped_steps"]
        scale = msgspec.convert(state["loss_scale"], LossScaleRow)
        if scale.kind != summary.loss_scale.kind:  # of another run, or a file that was changed
            raise ValueError(
                f"journal.loss_scale.kind is {scale.kind!r}, not {summary.loss_scale.kind!r}"
            )
        summary.loss_scale = scale
        self._substituted = msgspec.convert(state["substitutions"], list[Substitution])


READ_CLOCK_EVERY_S = 1.0  # A reading opens a file for each CPU


class ConditionsRecorder(Callback):
    """Sets `conditions` of the summary at the end; those of a resumed run are its last part's."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        self._load = LoadMeter()
        self._clock_mhz = ThinnedSeries()
        self._clock_ends_mhz: tuple[float, float] | None = None
        """The first reading and the last one."""
        self._read_at = -READ_CLOCK_EVERY_S  # the first step is read
        self._step_ms = ThinnedSeries()

    def on_steps(self, lines: list[StepLine]) -> None:
        for line in lines:
            if line.timed:
                self._step_ms.add(line.step_time_ms)
        now = time.perf_counter()
        if now - self._read_at >= READ_CLOCK_EVERY_S:  # the CPU has just computed a step
            self._read_at = now
            if (reading := clock_mhz()) is not None:
                self._clock_mhz.add(reading)
                self._clock_ends_mhz = (self._clock_ends_mhz or (reading, reading))[0], reading

    def on_end(self, status: Status) -> None:
        others, clock = self._load.share(), self._clock_mhz.values
        start_mhz, end_mhz = self._clock_ends_mhz or (None, None)
        self._summary.conditions = Conditions(
            other_load=None if others is None else others.other_load,
            steal=None if others is None else others.steal,
            clock_mhz=statistics.median(clock) if clock else None,
            clock_start_mhz=start_mhz,
            clock_end_mhz=end_mhz,
            drift=drift(self._step_ms),
        )


class MemoryCount(Callback):
    """Sets `memory_bytes` of a summary, once; the time for it belongs to the run's start-up.

    `count` gives bytes by category, and touches nothing of the run; it takes the seconds of the
    shortest step so far, None where no step was timed.
    """

    def __init__(
        self, summary: Summary, count: Callable[[float | None], Mapping[str, int]], watch: Stopwatch
    ) -> None:
        self._summary, self._count, self._watch = summary, count, watch
        self._done = False

    def on_steps(self, lines: list[StepLine]) -> None:
        # not before: it runs a step on fake tensors, whose import takes longer than the rest of a
        # start. So a run trains earlier, and a step that fails does so at once.
        self._once(min((line.step_time_ms / 1e3 for line in lines), default=None))

    def on_end(self, status: Status) -> None:
        if status == "failed":  # for want of memory, perhaps
            self._once(None)

    def _once(self, step_s: float | None) -> None:
        if self._done:
            return
        self._done = True
        with self._watch.during("start_up"):
            self._summary.memory_bytes = replace(self._summary.memory_bytes, **self._count(step_s))


EXCEPTIONS_VERSION = 1  # Of fp_exceptions.json
# Findings and expected exceptions after which no more events are written; counting continues
EVENTS = 1000


@dataclass
class ExceptionLog(Callback):
    """Records the exceptions of each step, as a file and as events of the recorder."""

    exceptions: RunExceptions
    row: FpExceptionsRow | None  # The summary's counts; None if the run does not detect exceptions
    folder: RunFolder
    recorder: Callback
    show: Callable[[str], None]

    def on_step_end(self, outcome: StepOutcome) -> None:
        """Write events and show new findings, unless the error that ends the run shows them."""
        counts = self.exceptions.report.counts
        if counts["finding"] + counts["expected"] <= EVENTS:
            for exception in outcome.exceptions:
                if exception.verdict != "absorbed":
                    self.recorder.on_event(event_row(exception))
        if outcome.new_findings and outcome.stop_reason is None:  # else the error has them
            for line in finding_lines(outcome.new_findings):
                self.show(line)
            self._write()

    def on_end(self, status: Status) -> None:
        self._write()

    def _write(self) -> None:
        """Update the summary and the file."""
        if self.row is not None:
            report = self.exceptions.report
            vars(self.row).update(report.counts, dropped_steps=report.dropped_steps)
            file = {"schema_version": EXCEPTIONS_VERSION, **report.state_dict()}
            write_json(self.folder.path / "fp_exceptions.json", file)


def event_row(exception: FpException) -> dict[str, object]:
    """An exception's line in metrics.jsonl; fp_exceptions.json has the rest."""
    columns = ("step", "verdict", "kind", "op", "phase", "module", "location", "process")
    row = {name: getattr(exception, name) for name in columns}
    if exception.process is None:
        del row["process"]
    return {"what": row.pop("kind"), "kind": "event", "event": "fp_exception", **row}


def of_all_processes(ranks: Ranks, own: Iterable[FpException]) -> tuple[FpException, ...]:
    """The exceptions of a step in all processes, each with the number of its process.

    Where one process has seen an op, exceptions without an op are left out.
    """
    if ranks.size == 1:
        return tuple(own)
    every = [
        replace(exception, process=number)
        for number, exceptions in enumerate(ranks.gather([*own]))
        for exception in exceptions
    ]
    # gradients are summed, so a NaN of one process appears in the others without an op
    known = [exception for exception in every if exception.has_op]
    return tuple(known or every)
