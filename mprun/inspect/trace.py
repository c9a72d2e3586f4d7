"""A trace of a plan's training step."""

from __future__ import annotations

import json
import time
from functools import partial
from importlib.resources import files
from statistics import median

import torch
import yaml  # type: ignore[import-untyped]

from mprun.config.schema import OpListsConfig
from mprun.inspect.op_trace import CallStack, LabelledCaster, StepTrace, trace, typical
from mprun.inspect.trace_result import TraceRecord, chrome, kinds_table, step_table, totals
from mprun.precision import Arithmetic, Caster, NativeArithmetic, WrappedArithmetic, devices
from mprun.precision.op_lists import OpLists, op_lists
from mprun.records.console.fitted_table import FittedTable
from mprun.records.files import json_text
from mprun.records.op_list_files import KINDS
from mprun.records.result import PartialResultError, Result
from mprun.study.planned_run import PlannedRun
from mprun.train.assemble.dtype_choices import entries
from mprun.train.assemble.parts import build_arithmetic, build_caster, build_parts, build_precision
from mprun.train.assemble.plan import Plan
from mprun.train.data import Batch
from mprun.train.loop import Trainer
from mprun.train.user_code import described
from mprun.watch.op_watcher import OpRecorder, OpWatcher, RecordedOp

SCHEMA_VERSION = 1
WARMUP = 3  # Steps before the first traced one: optimizer state and kernels are made in them

REPEATS = 5  # Steps traced; times are their medians
COMPUTED_BY_MPRUN = (
    "note: ops that mprun computes itself (emulated or substituted) are shown as the model calls "
    "them; casts inside them are not counted"
)


def trace_recipe(planned: PlannedRun, with_ops: bool) -> Result:
    """A training step of a planned run.

    Args:
        planned: the run.
        with_ops: whether every op is shown, not only kinds of them.

    Raises:
        PartialResultError: the step cannot run; its result has the ops before the failure.
    """
    with planned.executing():
        step, step_time_s = trace_step(planned.plan)
    summary = planned.summary
    record = TraceRecord(
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
    parts: list[FittedTable | str] = [totals(record), kinds_table(record.rows)]
    if with_ops:
        parts.append(step_table(record.rows))
    if is_computed_by_mprun(planned.plan):
        parts.append(COMPUTED_BY_MPRUN)
    files = {
        "trace.json": json_text(record),
        "trace.chrome.json": json.dumps(chrome(record.rows), indent=1),
    }
    return Result(record, parts, files)


def is_computed_by_mprun(plan: Plan) -> bool:
    """Whether mprun emulates or substitutes ops; a trace does not count the casts inside them."""
    return plan.execution == "emulated" or bool(build_arithmetic(plan).substitutions)


def trace_step(plan: Plan) -> tuple[StepTrace, float]:
    """A training step of this plan, and the median time in seconds of a step that is not traced.

    Raises:
        PartialResultError: the step cannot run.
    """
    calls = CallStack("autocast: " if plan.policy.casting == "autocast" else "")
    ops: list[RecordedOp] = []
    recorder = OpRecorder(ops.append, calls.current, partial(devices.synchronize, plan.device))
    precision = build_precision(
        plan, _caster(plan, calls), watched_arithmetic(build_arithmetic(plan), recorder)
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
        result = _before_the_failure(trace(ops, plan.layers), f"{where}{text}")
        raise PartialResultError(
            f"the step cannot run, the ops before the failure are above: {where}{text}", result
        ) from error
    times = [_timed(trainer, batch, plan.device) for _ in range(WARMUP + REPEATS)]
    traces = []
    for _ in range(REPEATS):
        ops.clear()
        with recorder.following(parts.model, parts.optimizer), recorder:
            trainer.optimizer_step(batch)
        traces.append(trace(ops, plan.layers))
    return typical(traces), median(times[WARMUP:])


def traced_step(plan: Plan, batch: Batch) -> StepTrace:
    """The first training step of this plan, on a batch."""
    calls = CallStack("autocast: " if plan.policy.casting == "autocast" else "")
    ops: list[RecordedOp] = []
    recorder = OpRecorder(ops.append, calls.current)
    arithmetic = watched_arithmetic(build_arithmetic(plan), recorder)
    parts = build_parts(plan, build_precision(plan, _caster(plan, calls), arithmetic))
    with recorder.following(parts.model, parts.optimizer), recorder:
        Trainer(parts, plan.limits).optimizer_step(batch)
    return trace(ops, plan.layers)


def _before_the_failure(step: StepTrace, error: str) -> Result:
    content = {
        "schema_version": SCHEMA_VERSION,
        "error": error,
        "totals": step.totals(step.time_ms or 1e3),
        "rows": step.rows,
    }
    parts = [step_table(step.rows)] if step.rows else []
    return Result(content, parts, {"trace.json": json_text(content)})


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


def watched_arithmetic(inner: Arithmetic, recorder: OpWatcher) -> Arithmetic:
    """An arithmetic whose ops a watcher sees as the model calls them."""
    native = isinstance(inner, NativeArithmetic)
    return inner if native else WrappedArithmetic(inner, lambda: recorder)


def _timed(trainer: Trainer, batch: Batch, device: torch.device) -> float:
    """Seconds of one step."""
    devices.synchronize(device)
    began = time.perf_counter()
    trainer.optimizer_step(batch)
    devices.synchronize(device)
    return time.perf_counter() - began
