"""One run from plan to record: the folder, the signals, the summary, the way out.

Whatever ends a run (its limits, an error, Ctrl-C, SIGTERM), the summary is written with the status
that says so, and what was recorded before stays readable.
"""

from __future__ import annotations

import time
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console

from mprun.build import Plan, build_parts, first_line, footprint
from mprun.checkpoint import save
from mprun.errors import EXIT_OK, MprunError, RunFailedError
from mprun.precision import backend_flags
from mprun.record import Epoch, Recorder, RunFolder, Scores, Status
from mprun.report import tables
from mprun.report.progress import Moment, ProgressView, view_for
from mprun.runner import Observer, StepLine, StopRequestedError, Trainer
from mprun.stop import SignalReceivedError, StopSignals
from mprun.summary import initial_summary
from mprun.timing import StepStatistics

WRITE_SUMMARY_EVERY_S = 1.0
FEW_EPOCHS = 20
SHOW_EPOCH_EVERY_S = 1.0
"""Beyond the first few, epochs are shown at most this often: a recipe may have hundreds."""


def run(chosen: Plan, resolved: dict[str, Any], stop: StopSignals, console: Console) -> int:
    """Carry a plan out; the exit status.

    Args:
        chosen: the plan.
        resolved: the configuration as config.yaml keeps it.
        stop: the signals, entered.
        console: where progress and the result are shown.

    Raises:
        UsageError: the run's folder cannot be used; nothing was begun.
        RunFailedError: the run failed; its record says why.
    """
    folder = RunFolder(_run_dir(chosen))
    session = _Session(chosen, resolved, folder, console)
    folder.config(OmegaConf.to_yaml(resolved))
    try:
        with backend_flags(chosen.policy):
            session.train(stop)
        session.finish("completed")
    except (StopRequestedError, SignalReceivedError):
        session.finish("interrupted", f"{stop.name} at step {session.steps}")
    except MprunError as error:
        session.finish("failed", str(error))
        raise
    except Exception as error:
        session.finish("failed", f"{type(error).__name__}: {error}")
        log = folder.path / "traceback.txt"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        raise RunFailedError(
            f"the run failed: {type(error).__name__}: {first_line(error)} "
            f"(the traceback is in {log})"
        ) from None
    finally:
        folder.close()
    session.show_result()
    if session.summary["status"] == "interrupted":
        console.print(f"stopped by {stop.name}; the record is in {folder.path}", highlight=False)
        return stop.exit_status
    return EXIT_OK


def _run_dir(chosen: Plan) -> Path:
    """`run.dir`, or a folder named by date and time that does not exist yet."""
    if chosen.config.run.dir is not None:
        return Path(chosen.config.run.dir)
    now = datetime.now()
    base = Path("outputs") / now.strftime("%Y-%m-%d") / now.strftime("%H-%M-%S")
    candidate, n = base, 1
    while candidate.exists():
        n += 1
        candidate = base.with_name(f"{base.name}-{n}")
    return candidate


class _Session:
    """Keeps the summary of a run up to date while it goes."""

    def __init__(
        self, chosen: Plan, resolved: dict[str, Any], folder: RunFolder, console: Console
    ) -> None:
        self._plan, self._folder, self._console = chosen, folder, console
        self._started = self._written_at = time.perf_counter()
        self.summary = initial_summary(chosen, resolved)
        self._statistics = StepStatistics()
        self._trainer: Trainer | None = None
        folder.summary(self.summary)

    @property
    def steps(self) -> int:
        """Optimizer steps attempted so far."""
        return self._trainer.step if self._trainer is not None else 0

    @property
    def epochs(self) -> int:
        """Epochs begun so far."""
        return self._trainer.epoch if self._trainer is not None else 0

    def train(self, stop: StopSignals) -> None:
        """Measure the footprint, train, test, save the final checkpoint."""
        chosen, summary = self._plan, self.summary
        for line in tables.header(summary):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._console.print(f"record: {self._folder.path}", highlight=False, soft_wrap=True)
        self._warn_if_slow()
        summary["memory_bytes"].update(self._measure_footprint())  # type: ignore[typeddict-item]
        parts = build_parts(chosen)
        planned = chosen.limits.planned_steps(len(parts.train))
        epochs = chosen.limits.epochs
        view = view_for(self._console, epochs, planned)
        log = _RunLog(self, self._folder, view, planned)
        trainer = self._trainer = Trainer(parts, chosen.limits, log, stop.requested)
        checkpoint = self._folder.path / "checkpoints" / "last.pt"
        view.start()
        try:
            with stop.deferred():
                try:
                    trainer.fit()
                except StopRequestedError:
                    save(checkpoint, trainer)
                    raise
                save(checkpoint, trainer)
                summary["test"] = trainer.evaluate(parts.test)
        finally:
            view.stop()
        if chosen.config.preset.loss_must_fall:
            check_loss_falls(log.losses)

    def epoch(self, epoch: Epoch) -> None:
        """An epoch ended."""
        self.summary["history"].append(epoch)
        if time.perf_counter() - self._written_at > WRITE_SUMMARY_EVERY_S:
            self._update()

    def add(self, lines: list[StepLine]) -> None:
        """Steps were taken."""
        for line in lines:
            if line.timed:
                self._statistics.add(line.step_time_ms, line.data_time_ms)

    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._started

    def _update(self) -> None:
        summary, statistics = self.summary, self._statistics
        trainer = self._trainer
        summary["wall_time_s"] = self.elapsed_s()
        summary["step_time_ms"] = statistics.step_times()
        summary["data_time_ms"] = statistics.data_times()
        summary["samples_per_second"] = statistics.samples_per_second(summary["batch_size"])
        if trainer is not None:
            summary["steps"], summary["epochs"] = trainer.step, trainer.epoch
            summary["train"] = {"loss": trainer.train_scores()["loss"]}
            summary["loss_scale"]["final"] = trainer.parts.precision.loss_scale.value
        if self._plan.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._plan.device)
            summary["memory_bytes"]["allocator_peak"] = peak
        self._folder.summary(summary)
        self._written_at = time.perf_counter()

    def finish(self, status: Status, error: str | None = None) -> None:
        """Write the last summary."""
        self.summary["status"], self.summary["error"] = status, error
        self._update()

    def show_result(self) -> None:
        """Print the final table."""
        self._console.print(tables.result(self.summary), highlight=False)

    def _warn_if_slow(self) -> None:
        name = self._plan.policy.compute_dtype
        if not self.summary["hardware"]["accelerated"].get(name, True):
            self._console.print(
                f"warning: {name} matmuls are slower than float32 on this machine: "
                "this run shows accuracy, not speed",
                highlight=False,
                soft_wrap=True,
            )

    def _measure_footprint(self) -> dict[str, int]:
        try:
            return footprint(self._plan)
        except Exception as error:  # a model may branch on data, which fake tensors do not have
            self._console.print(
                f"note: the memory of a step was not measured ({first_line(error)})",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            return {}


class _RunLog(Observer):
    """Writes steps and epochs to the record and shows them."""

    def __init__(
        self, session: _Session, recorder: Recorder, view: ProgressView, planned: int | None
    ) -> None:
        self._session, self._recorder, self._view, self._planned = session, recorder, view, planned
        config = session._plan.config
        self._every = config.train.log_every
        self._time_limit_s = config.train.max_time_s
        self._began = time.perf_counter()
        self._shown_at = 0.0
        self.losses: list[float] = []

    def steps(self, lines: list[StepLine]) -> None:
        self._session.add(lines)
        self.losses += [x.loss for x in lines]
        self._recorder.lines([_step_line(x) for x in lines if x.step % self._every == 0])
        self._view.update(self._moment(lines[-1]))

    def _moment(self, line: StepLine) -> Moment:
        elapsed = time.perf_counter() - self._began
        by_steps = line.step / self._planned if self._planned else 0.0
        by_time = elapsed / self._time_limit_s if self._time_limit_s else 0.0
        done = min(1.0, max(by_steps, by_time))
        return Moment(line.epoch, line.step, line.loss, line.step_time_ms, done, elapsed)

    def epoch(self, epoch: Epoch) -> None:
        self._session.epoch(epoch)
        if epoch["validation"]["loss"] is not None:
            line = {"kind": "validation", "step": self._session.steps, "epoch": epoch["epoch"]}
            self._recorder.lines([{**line, **epoch["validation"]}])
        now, epochs = time.perf_counter(), self._session.epochs
        if epochs <= FEW_EPOCHS or now - self._shown_at > SHOW_EPOCH_EVERY_S:
            self._shown_at = now
            self._view.line(_epoch_text(epoch))


def _step_line(line: StepLine) -> dict[str, Any]:
    row = {"kind": "step", **line._asdict()}
    del row["timed"]
    return row


def _epoch_text(epoch: Epoch) -> str:
    text = f"epoch {epoch['epoch']}:"
    parts: list[tuple[str, Scores]] = [
        ("training", epoch["train"]),
        ("validation", epoch["validation"]),
    ]
    for name, scores in parts:
        if scores["loss"] is not None:
            text += f"  {name} loss {float(scores['loss']):.4f}"
        if scores["accuracy"] is not None:
            text += f"  {name} accuracy {scores['accuracy']:.4f}"
    return text


def check_loss_falls(losses: list[float]) -> None:
    """Raise `RunFailedError` unless the last third's mean loss is below the first third's."""
    third = len(losses) // 3
    if third == 0:
        raise RunFailedError(f"the smoke check needs 3 steps or more, the run took {len(losses)}")
    first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
    if not last < first:
        raise RunFailedError(
            f"the loss does not fall: mean {first:.4f} over the first {third} steps, "
            f"{last:.4f} over the last {third}"
        )
