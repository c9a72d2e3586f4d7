"""A recipe's step on this machine: the share of the roof that it reaches, and whether 8 bits pay.

    least time    FLOPs of the step / best measured rate of the mode's number format
    share         least time / median step

FLOPs are those of `torch.utils.flop_counter`: products of matrices, convolutions and attention,
forward and backward. It knows no recurrent layers and no kernels of others, and counts causal
attention as if nothing were masked. All count in the mode's format, also what an op list keeps in
float32, so the time is a bound. Casts, norms and the optimizer have no FLOPs: a small share says
that a step is bound by memory or by work between ops.

Whether formats of 8 bits or fewer pay depends on the size of each linear layer: products become
faster, but factors are rounded first. So each shape of layer is timed, where the device multiplies
such formats: PyTorch's `nn.Linear` in bfloat16 against torchao's, compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mprun.errors import MprunError
from mprun.inspect.machine_examination import format_of, spread
from mprun.precision import gemms
from mprun.precision.rates import in_threads, warm
from mprun.records.console import ReportPart, report_nothing
from mprun.records.run_record import StepTimes
from mprun.study.planned_run import PlannedRun
from mprun.train.assemble.parts import build_parts
from mprun.train.assemble.plan import Plan
from mprun.train.assemble.planned_memory import as_native
from mprun.train.data import Batch
from mprun.train.loop import Trainer, TrainingComponents
from mprun.train.machine.doctor_result import (
    NO_LAYERS,
    NO_UNITS,
    PAYS_FROM,
    Examination,
    FormatGains,
    LayerGain,
    LayerGains,
    Roofline,
    Shape,
)

WARMUP = 5  # the first steps select kernels and make the optimizer's state
PASSES = 20  # the fastest of so many passes of a layer is hardly disturbed

EMULATED = "this mode is emulated here: the share is that of its emulation, not of the model"
ABOVE_THE_ROOF = (
    "the step was faster than its least time: measure again on a quiet machine, with a larger "
    "doctor.budget_s"
)


# ---- the share of the roof -----------------------------------------------------------------------


def recipe_roofline(
    planned: PlannedRun,
    examination: Examination,
    steps: int,
    report: ReportPart = report_nothing,
) -> tuple[Roofline, StepCount]:
    """Count a step of a planned run, compare it with the machine's rates, and time `steps` of it.

    The examination is of the plan's device; its threads are used.

    Raises:
        RunFailedError: the step cannot run.
        MprunError: the device has no memory for it.
    """
    plan = planned.plan
    try:
        with in_threads(examination.threads):
            report("counting the step's ops")
            step = count_step(planned)
            times = _timed(planned, steps, report)
    except (MemoryError, torch.OutOfMemoryError):
        raise MprunError(
            f"out of memory on {plan.device.type} while measuring: free some, or take a smaller "
            "train.batch_size"
        ) from None
    name, rate = best_rate(examination, plan)
    least_ms = step.flops / rate / 1e6  # the rate is in GFLOP/s
    share = least_ms / times.median if times.median else None
    execution = planned.summary.execution
    notes = [EMULATED] if execution == "emulated" else []
    notes += [ABOVE_THE_ROOF] if share is not None and share > 1 else []
    roof = Roofline(
        recipe=plan.config.recipe.name,
        precision=plan.policy.name,
        variant=planned.summary.variant,
        execution=execution,
        batch_size=plan.batch.effective,
        flops=step.flops,
        gflops={name: rate},
        least_ms=least_ms,
        step_time_ms=times,
        share=share,
        notes=notes,
    )
    return roof, step


def best_rate(examination: Examination, plan: Plan) -> tuple[str, float]:
    """The number format of the plan's products, and the best rate for it in GFLOP/s.

    The 90th percentile. float32's counts too: it can stand in for any format. Products of 8 bits
    have bfloat16's rate, since none was measured.
    """
    name = format_of(plan.policy)
    rates = (r.gflops.p90 for r in examination.rates if r.format in (name, "float32"))
    return name, max(rates)


class StepCount(NamedTuple):
    """What a step multiplies."""

    flops: int
    shapes: dict[Shape, list[str]]
    """Of linear layers that can have a format and that the step calls, to their names."""
    converted: list[str]  # The layers that a mode converts


def count_step(planned: PlannedRun) -> StepCount:
    """Count a step of the plan, by taking it once."""
    plan = planned.plan
    if plan.execution == "native" and plan.policy.gemms != "none":
        plan = as_native(plan)  # torchao's layers would hide their shapes
    # a compiled step has kernels instead of the ops that the counter knows
    plan = replace(plan, speed=replace(plan.speed, compile=False, linear_impl="blas"))
    counter, rows = _flop_counter(), dict[str, int]()
    with real_step(replace(planned, plan=plan)) as (parts, batch), ExitStack() as stack:
        layers = gemms.linear_layers(parts.model)
        for name, layer in layers.items():

            def called(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                rows[name] = inputs[0].numel() // inputs[0].shape[-1]

            stack.callback(layer.register_forward_pre_hook(called).remove)
        stack.enter_context(counter)
        Trainer(parts, plan.limits).optimizer_step(batch)
    shapes: dict[Shape, list[str]] = {}
    for name, layer in layers.items():
        if name in rows and gemms.fits(layer):
            shape = Shape(rows[name], layer.in_features, layer.out_features)
            shapes.setdefault(shape, []).append(name)
    # too few layers: a mode would be refused, a layer by name not
    converted = gemms.formatted_layers(parts.model, may_be_none=True)
    return StepCount(counter.get_total_flops(), shapes, converted)


def _flop_counter() -> FlopCounterMode:
    counter = FlopCounterMode(display=False)
    formulas, name = counter.flop_registry, "_scaled_dot_product_flash_attention"
    for end in ("", "_backward"):  # before 2.15 PyTorch had no formula for attention on a CPU
        known = formulas[getattr(torch.ops.aten, f"{name}{end}")]
        formulas.setdefault(getattr(torch.ops.aten, f"{name}_for_cpu{end}"), known)
    return counter


@contextmanager
def real_step(planned: PlannedRun) -> Iterator[tuple[TrainingComponents, Batch]]:
    """What a step of the plan runs on, and its batch, on real tensors; the step runs inside."""
    with planned.executing(), torch.random.fork_rng(devices=[]):
        parts = build_parts(planned.plan)
        with closing(parts.train.epoch(parts.order.draw())) as batches:
            yield parts, next(batches).trained


def _timed(planned: PlannedRun, steps: int, report: ReportPart) -> StepTimes:
    """The times of steps on one batch, without the wait for it."""
    if not steps:
        return StepTimes(median=None, p10=None, p90=None, n=0, warmup=0)
    with real_step(planned) as (parts, batch):
        trainer = Trainer(parts, planned.plan.limits)
        for done in range(WARMUP + steps):
            report("timing steps", done, WARMUP + steps)
            parts.clock.start()
            trainer.optimizer_step(batch)
            parts.clock.stop()
        times = parts.clock.take()[WARMUP:]
    return StepTimes(**vars(spread([t.ms for t in times])), warmup=WARMUP)


# ---- formats of 8 bits or fewer ------------------------------------------------------------------


def measure_formats(
    step: StepCount, device: torch.device, report: ReportPart = report_nothing
) -> FormatGains | str:
    """The gains of formats for the linear layers of a step, or why there are none."""
    reasons = {name: gemms.why_not_native(name, device) for name in gemms.RECIPES}
    formats = [name for name, reason in reasons.items() if reason is None]
    if not formats:
        return NO_UNITS.format(next(iter(reasons.values())))
    if not step.shapes:
        return NO_LAYERS
    rows, base, whole = [], 0.0, dict.fromkeys(formats, 0.0)
    for done, (shape, names) in enumerate(step.shapes.items()):
        report("timing linear layers", done, len(step.shapes))
        own = layer_us(shape, None, device)
        times = {name: layer_us(shape, name, device) for name in formats}
        gains = [
            LayerGain(format=name, us=us, speedup=own / us, pays=own / us >= PAYS_FROM)
            for name, us in times.items()
        ]
        rows.append(LayerGains(layers=names, **shape._asdict(), bfloat16_us=own, gains=gains))
        count = len({*step.converted}.intersection(names))
        base += count * own
        whole = {name: us + count * times[name] for name, us in whole.items()}
    return FormatGains(
        gpu=torch.cuda.get_device_name(device),
        basis="one layer at a time, compiled, forward and backward, the fastest of 20 passes",
        shapes=rows,
        speedup={name: base / us for name, us in whole.items() if us},
    )


def layer_us(shape: Shape, name: str | None, device: torch.device, native: bool = True) -> float:
    """Microseconds of a forward and a backward pass of a bfloat16 `nn.Linear`, the fastest.

    `name` is a key of `RECIPES`, in whose products it is converted; None for bfloat16. With
    `native` it is compiled, with the device's units; else it is torchao's emulation, as it is.
    """
    layer = nn.Linear(shape.in_features, shape.out_features, bias=False)
    model: nn.Module = nn.Sequential(layer).to(device, torch.bfloat16)
    if name is not None:
        gemms.convert_natively(model, ["0"], name, emulate=not native)
    # torchao's rounding is many small kernels, which only a compiler fuses
    forward: Callable[..., torch.Tensor] = torch.compile(model) if native else model
    x = torch.randn(
        shape.samples, shape.in_features, device=device, dtype=torch.bfloat16, requires_grad=True
    )
    gradient = torch.randn(shape.samples, shape.out_features, device=device, dtype=torch.bfloat16)
    passes = warm(lambda: forward(x).backward(gradient), device)
    return min(passes.time_s() for _ in range(PASSES)) * 1e6
