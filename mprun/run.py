"""One run from plan to record: the folder, the signals, the faults, the way out.

Whatever ends a run (its limits, an error, a full disk, Ctrl-C, SIGTERM), the summary is written
with the status that says so, and what was recorded before stays readable.
"""

from __future__ import annotations

import contextlib
import errno
import shlex
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console

from mprun.assemble import (
    Plan,
    build_caster,
    build_exceptions,
    build_parts,
    build_precision,
    footprint,
)
from mprun.assemble.effective import effective
from mprun.assemble.initial_summary import initial_summary
from mprun.console import ProgressView, RunProgress, print_line
from mprun.errors import EXIT_OK, MprunError, RunFailedError, first_line
from mprun.numerics.nonfinite import RunExceptions
from mprun.precision import Arithmetic, NativeArithmetic, Precision, backend_flags
from mprun.precision.accumulation import TERMS, sum_of_ones
from mprun.precision.layers import layer_rows
from mprun.precision.op_lists import CastLog
from mprun.precision.products import op_name
from mprun.records.run_record import (
    RunFolder,
    Status,
    Summary,
    TrainScore,
    dated_folder,
    read_summary,
)
from mprun.report import tables
from mprun.train import checkpoint
from mprun.train.exception_log import ExceptionLog
from mprun.train.loggers import build_logger
from mprun.train.loop import StopRequestedError, Trainer
from mprun.train.recorder import Journal
from mprun.train.signals import SignalReceivedError, StopSignals

MakeView = Callable[[int | None, int | None], ProgressView]
SKIPPED_SHARE = 0.1
"""Of the steps: a warning where more were skipped, as a tenth of the data then trained nothing."""
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run(
    chosen: Plan,
    resolved: dict[str, Any],
    stop: StopSignals,
    console: Console,
    saved: dict[str, Any] | None = None,
    view: MakeView | None = None,
) -> int:
    """Carry a plan out; the exit status.

    Args:
        chosen: the plan.
        resolved: the configuration as config.yaml keeps it.
        stop: the signals, entered.
        console: where progress and the result are shown.
        saved: the checkpoint of the run to go on with, or None.
        view: makes what shows progress, of the planned epochs and steps; None for the console's.

    Raises:
        UsageError: the run's folder cannot be used; nothing was begun.
        RunFailedError: the run failed; its record says why.
    """
    folder = _open_folder(chosen, saved)
    summary = initial_summary(chosen, resolved)
    if chosen.config.run.resume is not None:
        with contextlib.suppress(MprunError):  # a run killed at once has no summary
            earlier = read_summary(folder.path)
            summary.started_at = earlier.started_at
            both = [*earlier.warnings, *summary.warnings]
            summary.warnings = list(dict.fromkeys(both))
            summary.effective.partials_dtype = earlier.effective.partials_dtype
    made = view or (lambda epochs, steps: RunProgress(console, epochs, steps))
    session = _Session(chosen, summary, folder, console, made)
    try:
        with _faults_explained(session), backend_flags(chosen.policy, chosen.native_tf32):
            try:
                folder.config(OmegaConf.to_yaml(resolved))
                folder.summary(summary)
                session.train(stop, saved)
                session.finish("completed")
            except (StopRequestedError, SignalReceivedError):
                session.finish("interrupted", f"{stop.name} at step {summary.steps}")
    finally:
        folder.close()
    console.print(tables.result(summary), highlight=False)
    if summary.status == "interrupted":
        again = shlex.quote(f"run.resume={folder.path}")
        print_line(console, f"stopped by {stop.name}; go on with: mprun {again}")
        return stop.exit_status
    return EXIT_OK


def _open_folder(chosen: Plan, saved: dict[str, Any] | None) -> RunFolder:
    config = chosen.config.run
    if config.resume is None:
        return RunFolder(Path(config.dir) if config.dir is not None else dated_folder())
    step, in_epoch = 0, False
    if saved is not None:
        step, in_epoch = saved["trainer"]["step"], saved["trainer"]["in_epoch"]

    def keep(line: dict[str, Any]) -> bool:
        """Lines up to the checkpoint; the validation it was on the way to is done again."""
        redone = line["kind"] == "validation" and in_epoch and line["step"] == step
        return bool(line["step"] <= step and not redone)

    return RunFolder(Path(config.resume), keep)


class _Session:
    """The pieces of one run while it goes."""

    def __init__(
        self,
        chosen: Plan,
        summary: Summary,
        folder: RunFolder,
        console: Console,
        view: MakeView,
    ) -> None:
        self.summary, self.folder = summary, folder
        self._plan, self._console, self._view = chosen, console, view
        self._journal: Journal | None = None
        self._arithmetic: Arithmetic = NativeArithmetic()

    def train(self, stop: StopSignals, saved: dict[str, Any] | None) -> None:
        """Measure the footprint, train, test, save the final checkpoint."""
        chosen, path = self._plan, self.folder.path
        for line in (*tables.header(self.summary), f"record: {path}"):
            self._say(line)
        if chosen.weights.state:
            self._say(f"weights: {chosen.config.train.init_from}")
        self._warn_if_slow()
        with stop.deferred():
            self.summary.memory_bytes = replace(self.summary.memory_bytes, **self._footprint())
            exceptions = build_exceptions(chosen, lambda outcome: log.on_step_end(outcome))
            parts = build_parts(chosen, self._precision(exceptions))
            row = effective(chosen, parts.model, parts.optimizer, parts.precision)
            row.partials_dtype = self.summary.effective.partials_dtype  # as it was found
            self.summary.effective = row
        self._arithmetic = parts.precision.arithmetic
        stop.check()
        if chosen.layers:
            rows = layer_rows(parts.model, chosen.layers, chosen.policy)
            self._console.print(tables.layers(rows), highlight=False)
        planned = chosen.limits.planned_steps(len(parts.train))
        view = self._view(chosen.limits.epochs, planned)
        first_step = saved["trainer"]["step"] + 1 if saved is not None else None
        logger = build_logger(chosen.config.logger.name, path, first_step)

        def save() -> None:
            state = {"trainer": trainer.state_dict(), "journal": journal.state_dict()}
            state["exceptions"] = exceptions.state_dict()
            checkpoint.save(path, {**state, "choices": chosen.choices, **_identity(self.summary)})

        journal = self._journal = Journal(
            *(chosen, self.summary, self.folder, view, logger, planned, save),
            self._arithmetic,
        )
        log = ExceptionLog(self.summary, exceptions.report, self.folder, journal, self._say)
        every = chosen.config.train.checkpoint_every_steps
        trainer = Trainer(parts, chosen.limits, journal, stop.requested, every)
        if saved is not None:
            trainer.load_state_dict(saved["trainer"])
            journal.load_state_dict(saved["journal"])
            exceptions.load_state_dict(saved.get("exceptions", {}))
            self._say(f"resumed at step {trainer.step}")
        for notice in exceptions.attach(parts.model, parts.optimizer):
            self._say(f"note: {notice}")
        view.start()
        try:
            with stop.deferred():
                try:
                    trainer.fit()
                except StopRequestedError:
                    self.summary.train = TrainScore(loss=trainer.train_scores().loss)
                    save()
                    raise
                check_steps_taken(self.summary)
                journal.test(trainer.evaluate(parts.test))
        finally:
            view.stop()
            logger.close()
            log.write()
        if (text := skipped_warning(self.summary)) is not None:
            self._warn(text)
        if chosen.config.preset.loss_must_fall:
            check_loss_falls(journal.losses)

    def fail(self, error: str) -> None:
        """Write the last summary, if the disk takes it."""
        with contextlib.suppress(OSError):
            self.finish("failed", error)

    def finish(self, status: Status, error: str | None = None) -> None:
        """Write the last summary."""
        if status != "failed":
            self._measure_partials()
        if self._journal is not None:
            self._journal.finish(status, error)
        else:  # nothing was trained yet
            self.summary.status, self.summary.error = status, error
            self.folder.summary(self.summary)

    def _measure_partials(self) -> None:
        """Record in which dtype the run's own kernels added products up, where not in float32."""
        lowest = float(TERMS)
        for op, dtype in sorted(self._arithmetic.products, key=str):
            reached = sum_of_ones(op, dtype, self._plan.device)
            short = str(dtype).removeprefix("torch.")
            if reached < TERMS:
                self._warn(
                    f"{op_name(op)} adds up in {short} on this machine, not in float32: a sum "
                    f"that should be {TERMS:,} comes out as {reached:,.0f}"
                )
            if reached < lowest:
                lowest, self.summary.effective.partials_dtype = reached, short

    def _say(self, text: str) -> None:
        print_line(self._console, text)

    def _warn(self, text: str) -> None:
        """Print a warning and keep it in the record."""
        self._say(f"warning: {text}")
        if text not in self.summary.warnings:
            self.summary.warnings.append(text)

    def _warn_if_slow(self) -> None:
        name = self._plan.policy.compute_dtype
        if not self.summary.hardware.accelerated.get(name, True):
            self._warn(
                f"{name} matmuls are slower than float32 on this machine: "
                "this run shows accuracy, not speed (mprun doctor says why)"
            )

    def _precision(self, exceptions: RunExceptions) -> Precision:
        """The plan's, which tells of its casts and exceptions where that is wished."""
        chosen = self._plan
        told = chosen.op_lists is not None and chosen.config.op_lists.verbose
        caster = build_caster(chosen, CastLog(self._say) if told else None)
        return build_precision(chosen, caster, make=exceptions.precision)

    def _footprint(self) -> dict[str, int]:
        try:
            return footprint(self._plan)
        except Exception as error:  # a model may branch on data, which fake tensors do not have
            self._say(f"note: the memory of a step was not measured ({first_line(error)})")
            return {}


def _identity(summary: Summary) -> dict[str, Any]:
    """What a checkpoint says of the run it is from."""
    keys = ("recipe", "seed", "precision", "effective", "variant_hash", "mprun_version")
    return {key: value for key, value in asdict(summary).items() if key in keys}


@contextlib.contextmanager
def _faults_explained(session: _Session) -> Iterator[None]:
    """Turn what ends a run into a recorded status and one line for the user."""
    path = session.folder.path
    try:
        yield
    except MprunError as error:
        session.fail(str(error))
        raise
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            _fail_with_traceback(session, error)
        session.fail(f"the record cannot be written: {error.strerror}")
        step, begun = session.summary.steps, (path / "config.yaml").exists()
        again = f"mprun run.resume={path}" if begun else "begin again in another folder"
        raise RunFailedError(
            f"the record cannot be written ({error.strerror}): the run ended at step {step}; "
            f"what was recorded is in {path}; make room, then: {again}"
        ) from None
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            _fail_with_traceback(session, error)
        text = (
            f"out of memory on {session.summary.hardware.device} with "
            f"{session.summary.batch.micro} samples a micro-batch; try a smaller "
            "train.batch_size with train.accumulate"
        )
        session.fail(text)
        raise RunFailedError(text) from None
    except Exception as error:
        _fail_with_traceback(session, error)


def _is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error)


def _fail_with_traceback(session: _Session, error: BaseException) -> None:
    """A fault in the model's code or in ours: the record keeps the traceback."""
    session.fail(f"{type(error).__name__}: {error}")
    log, text = session.folder.path / "traceback.txt", traceback.format_exc()
    where = f"the traceback is in {log}"
    try:
        log.write_text(text, encoding="utf-8")
    except OSError:
        where = "its traceback could not be written"
    raise RunFailedError(
        f"the run failed: {type(error).__name__}: {first_line(error)} ({where})"
    ) from None


def check_steps_taken(summary: Summary) -> None:
    """Raise `RunFailedError` where a run ended without a single optimizer step.

    Its weights are those it began with: what it would be tested on was never trained.
    """
    steps, skipped = summary.steps, summary.skipped_steps
    if steps > skipped:
        return
    if not steps:
        raise RunFailedError(
            "no step was taken: train.max_time_s ended the run before the first one; give it more "
            "time"
        )
    raise RunFailedError(
        f"no step was taken: all {steps} were skipped, {_why_skipped(summary)}; the weights are "
        f"those the run began with; {_against_skipping(summary)}"
    )


def skipped_warning(summary: Summary) -> str | None:
    """A sentence where more than a tenth of the steps were skipped, or None."""
    steps, skipped = summary.steps, summary.skipped_steps
    if skipped <= steps * SKIPPED_SHARE:
        return None
    return (
        f"{skipped} of {steps} steps ({skipped / steps:.0%}) were skipped and trained nothing, "
        f"{_why_skipped(summary)}; {_against_skipping(summary)}"
    )


def _why_skipped(summary: Summary) -> str:
    scale, looked = summary.loss_scale, summary.fp_exceptions
    if looked is not None and looked.action == "skip":
        return "dropped by debug.fp_exceptions=skip or with gradients that were not finite"
    return (
        f"because gradients were not finite at the {scale.kind} loss scale "
        f"({scale.initial:g} at first, {scale.final:g} at the last step)"
    )


def _against_skipping(summary: Summary) -> str:
    """What to try, by the kind of loss scale."""
    ways = {
        "dynamic": "start from a smaller loss_scale.value, or train for more steps, since each "
        "skipped one lowers the scale",
        "static": "take a smaller loss_scale.value, or loss_scale=dynamic",
    }
    way = ways.get(summary.loss_scale.kind)
    look = "debug.fp_exceptions=halt names the op if the scale is not the cause"
    return f"{way}; {look}" if way else look


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
