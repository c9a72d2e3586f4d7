"""A trace of a plan's training step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import Any

import msgspec
import torch
import yaml  # type: ignore[import-untyped]

from mprun.assemble.dtype_choices import entries
from mprun.assemble.parts import build_parts
from mprun.assemble.plan import Plan
from mprun.assemble.precision_parts import build_arithmetic, build_caster, build_precision
from mprun.config.schema import OpListsConfig
from mprun.data import Batch
from mprun.errors import RunFailedError, first_line
from mprun.experiments.planned_run import PlannedRun
from mprun.numerics.op_trace import CallStack, LabelledCaster, StepTrace, trace, typical
from mprun.numerics.op_watcher import OpRecorder, RecordedOp
from mprun.precision import Arithmetic, Caster, NativeArithmetic, WrappedArithmetic
from mprun.precision.op_lists import OpLists, op_lists
from mprun.records.op_list_files import KINDS
from mprun.records.trace_record import TraceRecord, TraceRow
from mprun.train.loop import Trainer

SCHEMA_VERSION = 1
WARMUP = 3
"""Steps before the first traced one: optimizer state and kernels are made in them."""

REPEATS = 5
"""Steps traced; times are their medians."""


class TraceFailedError(RunFailedError):
    """A step that raised; `trace` holds the rows up to there, `text` says where and why."""

    def __init__(self, trace: StepTrace, text: str) -> None:
        super().__init__(text)
        self.trace = trace

    @property
    def content(self) -> dict[str, Any]:
        """What trace.json holds of it."""
        traced = self.trace.as_dict(self.trace.time_s or 1.0)
        return {"schema_version": SCHEMA_VERSION, "error": str(self), **traced}

    @property
    def rows(self) -> list[TraceRow]:
        """The ops before the failure."""
        return msgspec.convert(self.content["rows"], list[TraceRow])


@dataclass(frozen=True)
class RecipeTrace:
    """A traced step."""

    content: dict[str, Any]
    """What trace.json holds."""
    record: TraceRecord
    """The same, typed."""
    is_computed_by_mprun: bool
    """Whether some ops are emulated or substituted; the casts inside them are not counted."""


def trace_recipe(planned: PlannedRun) -> RecipeTrace:
    """A training step of a planned run.

    Raises:
        TraceFailedError: the step cannot run.
    """
    plan = planned.plan
    with planned.executing():
        step, step_time_s = trace_step(plan)
    content = {
        "schema_version": SCHEMA_VERSION,
        **planned.described(
            *("recipe", "precision", "variant", "execution", "hardware", "versions", "backend")
        ),
        "step_time_ms": step_time_s * 1e3,
        **step.as_dict(step_time_s),
    }
    substituted = bool(build_arithmetic(plan).substitutions)
    record = msgspec.convert(content, TraceRecord)
    return RecipeTrace(content, record, plan.execution == "emulated" or substituted)


def trace_step(chosen: Plan) -> tuple[StepTrace, float]:
    """A training step of this plan, and the median time in seconds of a step that is not traced.

    Raises:
        TraceFailedError: the step cannot run.
    """
    calls = CallStack("autocast: " if chosen.policy.casting == "autocast" else "")
    ops: list[RecordedOp] = []
    recorder = OpRecorder(ops.append, calls.current, _waiting(chosen.device))
    precision = build_precision(
        chosen, _caster(chosen, calls), _arithmetic(build_arithmetic(chosen), recorder)
    )
    parts = build_parts(chosen, precision)
    trainer = Trainer(parts, chosen.limits)
    batch = next(parts.train.epoch(parts.order.draw()))
    try:  # traced, so that a step that cannot run is shown as far as it goes
        with recorder.following(parts.model, parts.optimizer), recorder:
            trainer.optimizer_step(batch)
    except Exception as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        where = f"{recorder.fault}: " if recorder.fault is not None else ""
        raise TraceFailedError(trace(ops, chosen.layers), f"{where}{text}") from error
    times = [_timed(trainer, batch, chosen.device) for _ in range(WARMUP + REPEATS)]
    traces = []
    for _ in range(REPEATS):
        ops.clear()
        with recorder.following(parts.model, parts.optimizer), recorder:
            trainer.optimizer_step(batch)
        traces.append(trace(ops, chosen.layers))
    return typical(traces), median(times[WARMUP:])


def _caster(chosen: Plan, calls: CallStack) -> Caster:
    """The plan's caster, or one around it that reports its rules."""
    if chosen.op_lists is not None:
        return build_caster(chosen, calls)
    if chosen.policy.casting == "autocast":
        lists = shipped_op_lists("native", chosen.device)
    else:
        lists = op_lists((), (), first_input=False)
    return LabelledCaster(build_caster(chosen), lists, calls)


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
    wait = _waiting(device)
    wait()
    began = time.perf_counter()
    trainer.optimizer_step(batch)
    wait()
    return time.perf_counter() - began


def _waiting(device: torch.device):  # type: ignore[no-untyped-def]
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
