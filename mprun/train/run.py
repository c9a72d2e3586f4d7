"""One run, from a plan to its record.

The summary is always written with the status that ended the run (its limits, an error, a full disk,
Ctrl-C, SIGTERM or SIGHUP), and earlier records stay readable.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from torch import nn

from mprun.config import Config
from mprun.errors import MprunError, UsageError, first_line
from mprun.records.files import dated_folder
from mprun.records.run_folder import RECIPE, RunFolder
from mprun.records.run_record import Status, Summary, read_summary
from mprun.train.assemble import Plan, build_run, footprint, make_plan
from mprun.train.assemble.parts import effective, initial_summary, requested, run_loggers
from mprun.train.assemble.planned_memory import has_room_for_another
from mprun.train.assemble.quantity_probe import quantity_rows
from mprun.train.callbacks import Callback, Messages
from mprun.train.checkpoint import (
    Checkpointer,
    CheckpointMisfitError,
    Stateful,
    restoring,
    run_facts,
)
from mprun.train.checks import (
    AccumulationCheck,
    check_loss_falls,
    check_steps_taken,
    page_fault_warning,
    skipped_warning,
    slow_dtype_warning,
)
from mprun.train.logger import Logger
from mprun.train.loop import (
    StopRequestedError,
    Trainer,
    TrainingComponents,
    unfinished_epoch,
)
from mprun.train.parallel.coordinator import Coordinator, coordinator_here
from mprun.train.parallel.layouts import Layout
from mprun.train.parallel.ranks import PeerLostError
from mprun.train.recorder import (
    ConditionsRecorder,
    ExceptionLog,
    MemoryCount,
    Recorder,
)
from mprun.train.signals import SignalReceivedError, StopSignals
from mprun.train.stopwatch import Stopwatch
from mprun.train.user_code import explain_faults
from mprun.watch.nonfinite import RunExceptions

# Two real steps of less take less time than the import of PyTorch's compiler (1.8 s), which the
# first fake tensor of a process needs
QUICK_STEP_S = 0.5


class RunResult(NamedTuple):
    """How a run ended."""

    summary: Summary  # Its status is `completed`, or `interrupted` by a signal
    folder: Path  # The record's folder


def run(
    plan: Plan,
    resolved: dict[str, Any],
    stop: StopSignals,
    callbacks: Sequence[Callback] = (),
    saved: dict[str, Any] | None = None,
    watch: Stopwatch | None = None,
) -> RunResult:
    """Carry out a plan.

    `resolved` is the configuration for config.yaml, `saved` the checkpoint of the run to resume;
    `callbacks` are notified after the run's own; `watch` counts from its start-up on.

    Raises:
        UsageError: the run's folder cannot be used, or it was trained on other data.
        RunFailedError: the run failed; the reason is in its record.
    """
    watch = watch or Stopwatch()
    earlier = _earlier_summary(plan)
    with contextlib.closing(_open_folder(plan, saved)) as folder:  # holds its lock until the end
        summary = _first_summary(plan, resolved, earlier, watch)
        messages = Messages(summary, callbacks)
        first_step = None if saved is None else saved["trainer"]["step"] + 1
        loggers = run_loggers(plan, resolved, summary, folder.path, first_step, messages)
        with (
            _logged(loggers, summary, folder),
            explain_faults(summary, folder),
            plan.backend_flags(),
        ):
            folder.write("config.yaml", OmegaConf.to_yaml(resolved))  # first: a run resumes from it
            if plan.recipe_source is not None:
                folder.write(RECIPE, plan.recipe_source.content)
            folder.summary(summary)
            try:
                try:
                    shared = _StartedRun(plan, summary, folder, stop, messages, saved, watch)
                    _train(shared, [*loggers, *callbacks])
                finally:
                    watch.switch("logging")
                    summary.wall_time_s, summary.time_budget_s = watch.read()
                summary.status = "completed"
            except (StopRequestedError, SignalReceivedError):
                summary.status = "interrupted"
                summary.error = f"{stop.name} at step {summary.steps}"
            except CheckpointMisfitError:
                if earlier is not None:
                    folder.restore(earlier)  # nothing was trained: the record stays as it was
                raise
            folder.summary(summary)
    return RunResult(summary, folder.path)


class _StartedRun(NamedTuple):
    """What the parts of a run share in the first process."""

    plan: Plan
    summary: Summary
    folder: RunFolder
    stop: StopSignals
    messages: Messages
    saved: dict[str, Any] | None  # The checkpoint of the run to resume
    watch: Stopwatch


def _train(run: _StartedRun, callbacks: Sequence[Callback]) -> None:
    """Assemble the run, train, test and check it."""
    plan, summary, folder, stop, messages, saved, watch = run
    coordinator, path = coordinator_here(), folder.path
    layout = coordinator.layout(plan.config.parallel.name, plan.device)
    coordinator.announce(Job(plan.config, plan.choices, saved, plan.untrusted), path)
    parts, exceptions = _assemble(run, callbacks, layout, coordinator)

    arithmetic = parts.precision.arithmetic
    recorder = Recorder(
        summary, folder, arithmetic, plan.device, plan.config.train.log_every, watch
    )
    states: dict[str, Stateful] = {"journal": recorder, "exceptions": exceptions}
    facts = {"choices": plan.choices, **run_facts(summary)}
    checkpointer = Checkpointer(path, states, facts)
    log = ExceptionLog(exceptions, summary.fp_exceptions, folder, recorder, messages.report)
    check = AccumulationCheck(summary, arithmetic, plan.device, messages.warn)
    conditions = ConditionsRecorder(summary)
    count = MemoryCount(summary, partial(_footprint, plan, parts.model, messages.report), watch)
    # The order matters: loggers write before a checkpoint: a run resumed from it does not log
    # earlier steps again.
    callbacks = [count, recorder, conditions, *callbacks, checkpointer, log, check]
    trainer = _trainer(plan, parts, callbacks, stop, watch)
    _restore(run, trainer, states, coordinator)

    with _ending(callbacks, watch), stop.deferred(), coordinator.together():
        for callback in callbacks:
            callback.on_train_start(parts.model, watch.after_start_up_s)
        for notice in exceptions.attach(parts.model, parts.optimizer, log.on_step_end):
            messages.report(f"note: {notice}")
        trainer.fit()
        # all processes learn whether a step was taken: otherwise none tests (see `_follow`)
        layout.ranks.any(summary.steps == summary.skipped_steps)
        check_steps_taken(summary)
        trainer.test()
        coordinator.finish()
    with watch.during("evaluation"):
        summary.quantities = quantity_rows(plan, parts, messages.warn)
    if trainer.not_averaged is not None:
        messages.warn(f"no averaged weights were scored: {trainer.not_averaged}")
    _warn_at_end(run, recorder)


def _trainer(
    plan: Plan,
    parts: TrainingComponents,
    callbacks: Sequence[Callback],
    stop: StopSignals,
    watch: Stopwatch,
) -> Trainer:
    """The loop, the same in every process but for its callbacks."""
    train = plan.config.train
    return Trainer(
        parts,
        plan.limits,
        callbacks,
        stop.requested,
        train.checkpoint_every_steps,
        watch,
        validations=train.validations or 0,
        average_weights=train.average_weights,
    )


def _assemble(
    run: _StartedRun, callbacks: Sequence[Callback], layout: Layout, coordinator: Coordinator
) -> tuple[TrainingComponents, RunExceptions]:
    """The parts of the run, which all processes build at once; its callbacks start."""
    plan, summary, messages = run.plan, run.summary, run.messages
    # a signal waits until the parts are built: one process alone would leave the others waiting
    with run.stop.deferred():
        try:
            with coordinator.together():
                layout.ranks.barrier()  # the others have planned
                parts, exceptions = build_run(plan, messages.report, layout)
            row = effective(plan, parts.model, parts.optimizer, parts.precision)
            summary.converted_gemms = parts.precision.converted_gemms
            summary.effective = row.with_partials(summary.effective.partials_dtype)
        finally:
            # also where the model cannot be built: a tracker shows the failed run
            for callback in callbacks:
                callback.on_start(summary, run.folder.path)
            messages.warn(slow_dtype_warning(summary))
        with coordinator.together():
            _raise_if_stopped(layout, run.stop)
    return parts, exceptions


def _restore(
    run: _StartedRun,
    trainer: Trainer,
    states: dict[str, Stateful],
    coordinator: Coordinator,
) -> None:
    """Continue from the checkpoint of the run that is resumed, if any."""
    plan, saved, report = run.plan, run.saved, run.messages.report
    if saved is None:
        return
    with restoring(run.folder.path), coordinator.together():
        trainer.load_state_dict(saved["trainer"])
        for name, part in states.items():
            part.load_state_dict(saved[name])
    done = trainer.step == plan.planned_steps
    more = ", the run's last: train.epochs or train.max_steps lets it train on" if done else ""
    report(f"resumed at step {trainer.step}{more}")


def _warn_at_end(run: _StartedRun, recorder: Recorder) -> None:
    """Warnings about what the whole run shows."""
    config, summary, warn = run.plan.config, run.summary, run.messages.warn
    warn(skipped_warning(summary))
    warn(page_fault_warning(summary))
    if config.preset.loss_must_fall:
        losses = recorder.losses
        warn(check_loss_falls(losses.values, run.plan.planned_steps, losses.width))


def _raise_if_stopped(layout: Layout, stop: StopSignals) -> None:
    """End the run in all processes if one of them was asked to while it was assembled."""
    if layout.ranks.any(stop.requested()):
        raise StopRequestedError


class Job(NamedTuple):
    """What the other processes need to train beside the first one."""

    config: Config
    choices: dict[str, Any]  # `Plan.choices`, so that all processes make the same
    saved: dict[str, Any] | None  # The checkpoint of the run to resume
    untrusted: Path | None  # A folder whose code is not run


def follow(job: Job, stop: StopSignals, coordinator: Coordinator) -> None:
    """Train beside the first process, without a record: this process's part of a job.

    Raises:
        PeerLostError: another process is gone.
    """
    with stop.deferred():
        try:
            _follow(job, stop, coordinator)
        except PeerLostError:
            raise
        except (Exception, StopRequestedError):  # the first process fails too, and reports it
            return


def _follow(job: Job, stop: StopSignals, coordinator: Coordinator) -> None:
    with contextlib.ExitStack() as flags:
        with coordinator.together():
            plan = make_plan(
                job.config, (), job.choices, untrusted=job.untrusted, resumed=job.saved is not None
            )
            flags.enter_context(plan.backend_flags())
            layout = coordinator.layout(plan.config.parallel.name, plan.device)
            layout.ranks.barrier()
            parts, exceptions = build_run(plan, lambda line: None, layout)
        with coordinator.together():
            _raise_if_stopped(layout, stop)
        trainer = _trainer(plan, parts, (), stop, Stopwatch())
        if job.saved is not None:
            with coordinator.together():
                trainer.load_state_dict(job.saved["trainer"])
                exceptions.load_state_dict(job.saved["exceptions"])
        with coordinator.together():
            exceptions.attach(parts.model, parts.optimizer, lambda outcome: None)
            trainer.fit()
            if not layout.ranks.any(False):  # the first process decides: see `_train`
                trainer.test()


@contextlib.contextmanager
def _logged(loggers: Sequence[Logger], summary: Summary, folder: RunFolder) -> Iterator[None]:
    """At the end of the code inside, the record is complete: the loggers get its figures."""
    try:
        yield
    finally:
        before = len(summary.warnings)
        for logger in loggers:
            logger.finish_run(summary)
        if len(summary.warnings) > before:
            with contextlib.suppress(OSError):  # a full disk has been reported before
                folder.summary(summary)


@contextlib.contextmanager
def _ending(callbacks: Sequence[Callback], watch: Stopwatch) -> Iterator[None]:
    """At the end of the code inside, call `on_end` of all callbacks with its status."""
    status: Status = "failed"
    try:
        yield
        status = "completed"
    except (StopRequestedError, SignalReceivedError):
        status = "interrupted"
        raise
    finally:
        watch.switch("logging")
        with contextlib.ExitStack() as stack:  # calls all of them, even where one raises
            for callback in reversed(callbacks):
                stack.callback(callback.on_end, status)


def _earlier_summary(plan: Plan) -> Summary | None:
    """The summary of the run that is resumed; None for a new run, or one that was killed at once.

    Raises:
        UsageError: the run would be resumed on another data set. (Data of a recipe's file have its
            name; its SHA-256 was compared.)
    """
    resume, name = plan.config.run.resume, plan.splits.name
    if resume is None:
        return None
    try:
        earlier = read_summary(Path(resume))
    except MprunError:  # it was killed before its first summary
        return None
    if plan.recipe_source is None and name != earlier.data.name:
        raise UsageError(
            f"run.resume={resume}: the run was trained on {earlier.data.name}, and now there is "
            f"{name}; put the data back, or begin a new run"
        )
    return earlier


def _open_folder(plan: Plan, saved: dict[str, Any] | None) -> RunFolder:
    config = plan.config.run
    if config.resume is None:
        return RunFolder(Path(config.dir) if config.dir is not None else dated_folder())
    step = 0 if saved is None else saved["trainer"]["step"]
    unfinished = None if saved is None else unfinished_epoch(saved["trainer"])

    def keep(line: dict[str, Any]) -> bool:
        """Keep lines up to the checkpoint, except scores at its step inside an epoch."""
        # they came after the checkpoint, and are computed again
        is_score = line["kind"] in ("validation", "epoch")
        redone = is_score and line["step"] == step and line["epoch"] == unfinished
        return bool(line["step"] <= step and not redone)

    return RunFolder(Path(config.resume), keep)


def _first_summary(
    plan: Plan, resolved: dict[str, Any], earlier: Summary | None, watch: Stopwatch
) -> Summary:
    """The summary before the first step; that of a resumed run continues its earlier one."""
    summary = initial_summary(plan, resolved, watch.elapsed_here_s, requested(plan))
    if earlier is not None:
        summary.started_at, summary.memory_bytes = earlier.started_at, earlier.memory_bytes
        summary.warnings = list(dict.fromkeys([*earlier.warnings, *summary.warnings]))
        summary.effective = summary.effective.with_partials(earlier.effective.partials_dtype)
    return summary


def _footprint(
    plan: Plan, model: nn.Module, report: Callable[[str], None], step_s: float | None
) -> dict[str, int]:
    """The memory of a step; a second model on real tensors is made only if it is small."""
    real = has_room_for_another(model, plan.device)
    on_cpu = plan.device.type == "cpu"  # a GPU's peak is measured, and would rise
    quick = real and on_cpu and step_s is not None and step_s < QUICK_STEP_S
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself shows them
            counted, why_real = footprint(plan, real, quick)
    except Exception as error:  # the step may not run at all: the run itself will say so
        report(f"note: the memory of a step was not measured ({first_line(error)})")
        return {}
    if why_real is not None:
        report(f"note: the memory of a step was counted on a real step: {why_real}")
    return counted
