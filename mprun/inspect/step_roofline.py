"""The least time of a recipe's step on this machine, and the share of it that the step reaches.

Ops are counted on fake tensors, in the ops that the mode needs: an emulated mode is held against
its native one. Then steps are timed as a run times them, on one batch, without the wait for it.
Last, a few steps are taken op by op, each op timed by itself: that shows in which group the time
above the least is spent.

From the same step follow estimates (`mprun.results.estimates`): the step on several processes, and
whether formats of 8 bits or fewer pay for its linear layers, whose shapes are those of one
micro-batch's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar, cast

import torch
from torch import nn

from mprun import devices
from mprun.assemble.parts import build_parts
from mprun.assemble.plan import Plan
from mprun.assemble.planned_memory import (
    as_native,
    fake_step,
    gathered_itemsizes,
)
from mprun.config import compose
from mprun.console import ReportPart, report_nothing
from mprun.console.fitted_table import FittedTable
from mprun.data import Batch
from mprun.doctor.measure import WORKING_SETS, measure_bandwidths, measure_formats, spread
from mprun.doctor.roofline import (
    MachineRates,
    format_name,
    fused_ms,
    group_ms,
    roof_groups,
    what_holds,
)
from mprun.errors import MprunError, RunFailedError
from mprun.experiments.planned_run import PlannedRun, plan_run
from mprun.inspect.machine_examination import examine
from mprun.numerics.op_cost import OpCost, count_costs
from mprun.precision.gemms import fits, formatted_layers, linear_layers
from mprun.precision.policy import Policy, torch_dtype
from mprun.precision.rates import in_threads
from mprun.records.run_record import StepTimes
from mprun.results import Result
from mprun.results.doctor_result import DoctorSettings, Examination, renderables
from mprun.results.estimates import (
    GPUS,
    NO_FORMATS,
    FormatGains,
    ScalingEstimate,
    Shape,
    estimate_scaling,
    format_parts,
    predicted,
    scaling_parts,
    sent_bytes,
)
from mprun.results.memory_result import ParallelKind
from mprun.results.roofline_result import GROUPS, GroupName, Roofline, roofline_parts
from mprun.train.clock import StepTime
from mprun.train.loop import Trainer, TrainingComponents
from mprun.train.user_code import described

T = TypeVar("T")

WARMUP = 5
"""Steps before the first timed one."""
COUNTED = 5
"""Steps whose ops are timed one by one; the median counts."""

EMULATED = (
    "this mode is emulated here: the least time is that of its ops in native kernels, the step is "
    "that of the emulation, so its share is no property of the model"
)
REPLACED = "ops that mprun computes itself are not timed one by one"
ABOVE_THE_ROOF = (
    "the step was faster than its least time: rates and step were measured at different loads; "
    "measure again on a quiet machine, with a larger doctor.budget_s"
)


class MeasuredStep(NamedTuple):
    """A step, taken again and again as a run takes it."""

    times: list[StepTime]
    group_ms: dict[GroupName, float] | None
    """The time of each group's ops; None where mprun computes some ops itself."""


def plan_step(overrides: Sequence[str], config_dir: Path | None = None) -> PlannedRun:
    """Plan a run whose step is examined, on generated data unless the user chose others.

    The time of a step does not depend on the values of its samples.

    Args:
        overrides: of a run.
        config_dir: a further folder of configs.

    Raises:
        UsageError: the run cannot be planned.
    """
    if any(text.lstrip("+~").startswith("data.") for text in overrides):
        return plan_run(compose(overrides, config_dir), "doctor")
    composed = compose([*overrides, "data.source=generated"], config_dir)
    given = tuple(key for key in composed.given if key != "data.source")
    return plan_run(replace(composed, given=given), "doctor")


def recipe_roofline(
    planned: PlannedRun,
    examined: Examination,
    steps: int,
    report: ReportPart = report_nothing,
) -> Roofline:
    """Count a step of a planned run, hold it against the machine's rates, and time it.

    Args:
        planned: the run, with data that its steps can be taken on.
        examined: doctor's examination of the plan's device; its threads are used.
        steps: how many are timed; 0 for none.
        report: is called before each part.

    Raises:
        RunFailedError: the step cannot run.
        MprunError: the device has no memory for it.
    """
    plan = planned.plan
    try:
        with in_threads(examined.threads):
            bandwidths = measure_bandwidths(plan.device, WORKING_SETS[plan.device.type], report)
            report("counting the step's ops")
            ops, why_real = count_step(planned)
            timed = _timed(planned, steps, report) if steps else MeasuredStep([], None)
    except (MemoryError, torch.OutOfMemoryError):
        raise MprunError(
            f"out of memory on {plan.device.type} while measuring: free some, or take a smaller "
            "train.batch_size"
        ) from None
    return _roofline(
        planned, examined, MachineRates.of(examined.rates, bandwidths), ops, why_real, timed
    )


def count_step(planned: PlannedRun) -> tuple[list[OpCost], str | None]:
    """The work of each op of the plan's step, and why it was counted in a real step, if it was.

    Raises:
        RunFailedError: the step cannot run.
    """
    native = as_native(planned.plan)
    try:
        with fake_step(native) as (parts, batch):
            return _counted(native, parts, batch), None
    except MprunError:
        raise
    except Exception as error:  # the model reads values, which fake tensors do not have
        if planned.plan.execution == "emulated":
            raise RunFailedError(
                f"a step of {planned.plan.policy.name} cannot be counted on fake tensors, which "
                f"have no values: {described(error, planned.plan.policy.name)}"
            ) from error
        reason = described(error, native.policy.name)
    with real_step(planned) as (parts, batch):
        return _counted(native, parts, batch), reason


def _counted(plan: Plan, parts: TrainingComponents, batch: Batch) -> list[OpCost]:
    trainer = Trainer(parts, plan.limits)
    return count_costs(lambda: trainer.optimizer_step(batch), parts.model, parts.optimizer)


@contextmanager
def real_step(planned: PlannedRun) -> Iterator[tuple[TrainingComponents, Batch]]:
    """What a step of the plan runs on, and its batch, on real tensors; the step runs inside."""
    with planned.executing(), torch.random.fork_rng(devices=[]):
        parts = build_parts(planned.plan)
        with closing(parts.train.epoch(parts.order.draw())) as batches:
            yield parts, next(batches).trained


def _timed(planned: PlannedRun, steps: int, report: ReportPart) -> MeasuredStep:
    with real_step(planned) as (parts, batch):
        trainer = Trainer(parts, planned.plan.limits)
        for done in range(WARMUP + steps):
            report("timing steps", done, WARMUP + steps)
            parts.clock.start()
            trainer.optimizer_step(batch)
            parts.clock.stop()
        times = parts.clock.take()[WARMUP:]
        if planned.plan.execution == "emulated" or parts.precision.substitutions:
            return MeasuredStep(times, None)
        report("timing ops")
        return MeasuredStep(
            times, _op_times(planned.plan, parts, lambda: trainer.optimizer_step(batch))
        )


def _op_times(
    plan: Plan, parts: TrainingComponents, step: Callable[[], object]
) -> dict[GroupName, float]:
    def synchronize() -> None:
        devices.synchronize(plan.device)

    rows = [
        group_ms(count_costs(step, parts.model, parts.optimizer, synchronize, warmup=0))
        for _ in range(COUNTED)
    ]
    return {name: median(row[name] for row in rows) for name in GROUPS}


def _roofline(
    planned: PlannedRun,
    examined: Examination,
    rates: MachineRates,
    ops: Sequence[OpCost],
    why_real: str | None,
    timed: MeasuredStep,
) -> Roofline:
    plan = planned.plan
    groups = roof_groups(ops, rates, plan.native_tf32, timed.group_ms)
    least_ms = sum(g.least_ms for g in groups)
    times = _statistics(timed.times)
    step_ms, price_us = times.median, examined.machine.hardware.page_fault_us
    counted = [t.page_faults for t in timed.times if t.page_faults is not None]
    faults = median(counted) if counted else None
    in_ops_ms = None if timed.group_ms is None else sum(timed.group_ms.values())
    formats = {format_name(op.dtype, plan.native_tf32) for op in ops if op.dtype is not None}
    roof = Roofline(
        recipe=plan.config.recipe.name,
        precision=plan.policy.name,
        variant=planned.summary.variant,
        execution=planned.summary.execution,
        batch_size=plan.batch.effective,
        gflops={name: rate for name, rate in rates.gflops.items() if name in formats},
        bandwidths=list(rates.bandwidths),
        groups=groups,
        least_ms=least_ms,
        fused_ms=fused_ms(groups),
        why_real=why_real,
        step_time_ms=times,
        share=least_ms / step_ms if step_ms else None,
        outside_ms=max(0.0, step_ms - in_ops_ms) if step_ms and in_ops_ms is not None else None,
        page_faults=faults,
        page_faults_ms=None if faults is None or price_us is None else faults * price_us * 1e-3,
        notes=[],
    )
    roof.notes = list(_notes(roof))
    return roof


def _notes(roof: Roofline) -> Iterator[str]:
    if (held := what_holds(roof)) is not None:
        yield held
    if roof.why_real is not None:
        yield f"ops were counted in a real step: {roof.why_real}"
    if roof.execution == "emulated":
        yield EMULATED
    if roof.step_time_ms.n and roof.outside_ms is None:
        yield REPLACED
    if roof.share is not None and roof.share > 1:
        yield ABOVE_THE_ROOF


def _statistics(times: Sequence[StepTime]) -> StepTimes:
    if not times:
        return StepTimes(median=None, p10=None, p90=None, n=0, warmup=0)
    return StepTimes(**vars(spread([t.ms for t in times])), warmup=WARMUP)


def recipe_scaling(
    planned: PlannedRun,
    roof: Roofline,
    parallel: ParallelKind,
    world_size: int,
    links: Sequence[str],
) -> ScalingEstimate:
    """The estimate; a step that was not measured, or is emulated, takes its least time.

    Args:
        planned: the run whose step it is.
        roof: of this step.
        parallel: how the processes share the step.
        world_size: their number, 2 or more.
        links: names in `LINK_BANDWIDTHS`.
    """
    plan = as_native(planned.plan)
    parameters, gradients = _of_step(planned, lambda parts, _: _bytes(parts.model, plan.policy))
    measured_ms = roof.step_time_ms.median if roof.execution == "native" else None
    return estimate_scaling(
        parallel=parallel,
        world_size=world_size,
        compute_ms=roof.least_ms if measured_ms is None else measured_ms,
        compute_from="least time" if measured_ms is None else "measured step",
        gather_dtype=plan.policy.compute_dtype if parallel == "fsdp2" else None,
        reduce_dtype=plan.policy.reduce_dtype,
        sent_bytes=sent_bytes(parallel, world_size, parameters, gradients, plan.batch.accumulate),
        links=links,
    )


def _bytes(model: nn.Module, policy: Policy) -> tuple[int, int]:
    cast = gathered_itemsizes(model, policy)
    parameters = [(name.rpartition(".")[0], p) for name, p in model.named_parameters()]
    return (
        sum(p.numel() * min(p.itemsize, cast.get(owner, p.itemsize)) for owner, p in parameters),
        sum(p.numel() for _, p in parameters if p.requires_grad)
        * torch_dtype(policy.reduce_dtype).itemsize,
    )


def recipe_formats(
    planned: PlannedRun, gpus: Iterable[str], report: ReportPart = report_nothing
) -> list[FormatGains]:
    """The gains on the plan's device if it has such products, else on GPUs that have.

    Empty without linear layers.

    Args:
        planned: the run.
        gpus: keys of `GPUS`.
        report: is called before each part.
    """
    report("counting linear layers")
    shapes, converted = layer_shapes(planned)
    if not shapes:
        return []
    report("timing linear layers")
    here = measure_formats(shapes, planned.plan.device, converted)
    return [predicted(shapes, GPUS[gpu], converted) for gpu in gpus] if here is None else [here]


def layer_shapes(planned: PlannedRun) -> tuple[dict[Shape, list[str]], list[str]]:
    """The linear layers of each shape, the first in the model's order; and those a mode converts.

    Layers that a step does not call, or that can have no format, are left out.
    """
    return _of_step(planned, lambda parts, batch: _shapes(planned.plan, parts, batch))


def _of_step(planned: PlannedRun, look: Callable[[TrainingComponents, Batch], T]) -> T:
    """What a look at a step finds, on fake tensors or, if the model reads values, on real ones."""
    try:
        with fake_step(as_native(planned.plan)) as (parts, batch):
            return look(parts, batch)
    except Exception:  # a model that reads values has been measured on real tensors
        with real_step(planned) as (parts, batch):
            return look(parts, batch)


def _shapes(
    plan: Plan, parts: TrainingComponents, batch: Batch
) -> tuple[dict[Shape, list[str]], list[str]]:
    layers, rows = linear_layers(parts.model), dict[str, int]()
    trainer = Trainer(parts, plan.limits)
    with ExitStack() as stack:
        for name, layer in layers.items():

            def called(_: nn.Module, inputs: tuple[object, ...], name: str = name) -> None:
                x = inputs[0]
                rows[name] = x.numel() // x.shape[-1]  # type: ignore[attr-defined]

            stack.callback(layer.register_forward_pre_hook(called).remove)
        trainer.optimizer_step(batch)
    shapes: dict[Shape, list[str]] = {}
    for name, layer in layers.items():
        if name in rows and fits(layer):
            shape = Shape(rows[name], layer.in_features, layer.out_features)
            shapes.setdefault(shape, []).append(name)
    try:
        converted = formatted_layers(parts.model)
    except ValueError:  # too few layers: a mode would be refused, a layer by name not
        converted = []
    return shapes, converted


def examined(
    device: str,
    planned: PlannedRun | None,
    settings: DoctorSettings,
    report: ReportPart = report_nothing,
) -> Result:
    """The examination of a machine, or of a recipe's step on it.

    Args:
        device: auto, or the name of a device.
        planned: the run whose step it is, or None.
        settings: of the examination.
        report: is called before each part.
    """
    keep_heap = planned is None or planned.plan.config.speed.name != "plain"
    examination = examine(device, settings.budget_s, report, keep_heap)
    if planned is None:
        return Result(examination, list(renderables(examination)))
    roofline = recipe_roofline(planned, examination, settings.steps, report)
    examination = replace(
        examination,
        roofline=roofline,
        formats=recipe_formats(planned, settings.gpus, report),
    )
    if settings.world_size > 1:
        parallel = cast(ParallelKind, settings.parallel)
        size, links = settings.world_size, settings.links
        scaling = recipe_scaling(planned, roofline, parallel, size, links)
        examination = replace(examination, scaling=scaling)
    return Result(examination, list(_parts(examination, roofline)))


def _parts(examination: Examination, roofline: Roofline) -> Iterator[FittedTable | str]:
    """The tables of a recipe's step on the machine."""
    yield from roofline_parts(roofline)
    if not examination.formats:
        yield NO_FORMATS
    for gains in examination.formats or ():
        yield from format_parts(gains)
    if examination.scaling is not None:
        yield from scaling_parts(examination.scaling)
