"""A trace of a plan's training step."""

from __future__ import annotations

import time
from functools import partial
from importlib.resources import files
from statistics import median
from typing import Any

import msgspec
import torch
import yaml  # type: ignore[import-untyped]

from mprun import devices
from mprun.assemble.dtype_choices import entries
from mprun.assemble.parts import build_parts
from mprun.assemble.plan import Plan
from mprun.assemble.precision_parts import build_arithmetic, build_caster, build_precision
from mprun.config.schema import OpListsConfig
from mprun.data import Batch
from mprun.errors import RunFailedError
from mprun.experiments.planned_run import PlannedRun
from mprun.numerics.op_trace import CallStack, LabelledCaster, StepTrace, trace, typical
from mprun.numerics.op_watcher import OpRecorder, RecordedOp
from mprun.precision import Arithmetic, Caster, NativeArithmetic, WrappedArithmetic
from mprun.precision.op_lists import OpLists, op_lists
from mprun.records.op_list_files import KINDS
from mprun.records.trace_record import TraceRecord
from mprun.train.loop import Trainer
from mprun.train.user_code import described

SCHEMA_VERSION = 1
WARMUP = 3
"""Steps before the first traced one: optimizer state and kernels are made in them."""

REPEATS = 5
"""Steps traced; times are their medians."""


class TraceFailedError(RunFailedError):
    """A step that raised an error: `trace` has the ops before it; the text names op and reason."""

    def __init__(self, trace: StepTrace, text: str) -> None:
        super().__init__(text)
        self.trace = trace

    @property
    def content(self) -> dict[str, Any]:
        """The content of trace.json."""
        totals = self.trace.totals(self.trace.time_ms or 1e3)
        return {
            "schema_version": SCHEMA_VERSION,
            "error": str(self),
            "totals": msgspec.to_builtins(totals),
            "rows": msgspec.to_builtins(self.trace.rows),
        }


def trace_recipe(planned: PlannedRun) -> TraceRecord:
    """A training step of a planned run.

    Raises:
        TraceFailedError: the step cannot run.
    """
    with planned.executing():
        step, step_time_s = trace_step(planned.plan)
    summary = planned.summary
    return TraceRecord(
        schema_version=SCHEMA_VERSION,
        versions=summary.versions,
        hardware=summary.hardware,
        recipe=summary.recipe,
        precision=summary.precision,
        variant=summary.variant,
        execution=summary.execution,
        backend=summary.backend,
        step_time_ms=step_time_s * 1e3,
        totals=step.totals(step_time_s * 1e3),
        rows=step.rows,
    )


def is_computed_by_mprun(plan: Plan) -> bool:
    """Whether mprun emulates or substitutes ops; a trace does not count the casts inside them."""
    return plan.execution == "emulated" or bool(build_arithmetic(plan).substitutions)


def trace_step(plan: Plan) -> tuple[StepTrace, float]:
    """A training step of this plan, and the median time in seconds of a step that is not traced.

    Raises:
        TraceFailedError: the step cannot run.
    """
    calls = CallStack("autocast: " if plan.policy.casting == "autocast" else "")
    ops: list[RecordedOp] = []
    recorder = OpRecorder(ops.append, calls.current, partial(devices.synchronize, plan.device))
    precision = build_precision(
        plan, _caster(plan, calls), _arithmetic(build_arithmetic(plan), recorder)
    )
    parts = build_parts(plan, precision)
    trainer = Trainer(parts, plan.limits)
    batch = next(parts.train.epoch(parts.order.draw()))
    try:  # traced: of a step that fails, the ops before the failure are shown
        with recorder.following(parts.model, parts.optimizer), recorder:
            trainer.optimizer_step(batch)
    except Exception as error:
        text = described(error, plan.policy.name)
        where = f"{recorder.fault}: " if recorder.fault is not None else ""
        raise TraceFailedError(trace(ops, plan.layers), f"{where}{text}") from error
    times = [_timed(trainer, batch, plan.device) for _ in range(WARMUP + REPEATS)]
    traces = []
    for _ in range(REPEATS):
        ops.clear()
        with recorder.following(parts.model, parts.optimizer), recorder:
            trainer.optimizer_step(batch)
        traces.append(trace(ops, plan.layers))
    return typical(traces), median(times[WARMUP:])


def _caster(plan: Plan, calls: CallStack) -> Caster:
    """The plan's caster, or one around it that reports its rules."""
    if plan.op_lists is not None:
        return build_caster(plan, calls)
    if plan.policy.casting == "autocast":
        lists = shipped_op_lists("native", plan.device)
    else:
        lists = op_lists((), (), first_input=False)
    return LabelledCaster(build_caster(plan), lists, calls)


def shipped_op_lists(name: str, device: torch.device) -> OpLists:
    """The lists of a file in conf/op_lists, for a device."""
    text = (files("mprun.conf") / "op_lists" / f"{name}.yaml").read_text(encoding="utf-8")
    section = OpListsConfig(**yaml.safe_load(text)["op_lists"])
    lower, fp32, promote = (entries(section, kind, device) for kind in KINDS)
    return op_lists(lower, fp32, promote, first_input=str(section.unlisted) == "first_input")


def _arithmetic(inner: Arithmetic, recorder: OpRecorder) -> Arithmetic:
    native = isinstance(inner, NativeArithmetic)
    return inner if native else WrappedArithmetic(inner, lambda: recorder)


def _timed(trainer: Trainer, batch: Batch, device: torch.device) -> float:
    """Seconds of one step."""
    devices.synchronize(device)
    began = time.perf_counter()
    trainer.optimizer_step(batch)
    devices.synchronize(device)
    return time.perf_counter() - began
