"""A search for the ops of a recipe that must stay in float32.

1  train a few steps in float32, so that weights and gradients are those of a training
2  take a few batches of validation data
3  measure each op and module, search the smallest list (`mprun.numerics.sensitivity`)
4  keep modules apart instead of ops, if that leaves less in float32
5  train with the result and in float32, in pairs (`proof.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch

from mprun.assemble import Plan, build_arithmetic, build_caster, build_loss_scale, build_parts
from mprun.config.settings import SearchOpsSettings
from mprun.experiments.proof import SelectedCasts, weights_after
from mprun.numerics.op_search import Fp32List, OpEffect, Sensitivity, sensitivity
from mprun.numerics.passes import FLOAT32, Batch, CastPlan
from mprun.numerics.tolerance import Tolerance
from mprun.precision import backend_flags
from mprun.precision.policy import torch_dtype
from mprun.records.deviation import SearchTolerance
from mprun.records.search_ops_record import (
    CastResult,
    Float32Time,
    Fp32Selection,
    GivenCasts,
    OpSearch,
    RoundedWeights,
    Samples,
    Selections,
    SensitivityRow,
)
from mprun.train.loop import Parts

SCALE_STEP = 16.0
"""Loss scales that are tried are this factor apart."""


def search_ops(
    low: Plan,
    reference: Plan,
    settings: SearchOpsSettings,
    report: Callable[[str], None],
) -> tuple[OpSearch, SelectedCasts]:
    """Measure and search.

    Args:
        low: the plan of a mixed mode, without `precision.layers`.
        reference: the same in fp32.
        settings: of the search.
        report: is called with a short text before each measurement.

    Returns:
        The result, and its answer as trainings take it.

    Raises:
        ValueError: the model cannot be measured, see `sensitivity`.
    """
    report(f"training {settings.warmup_steps} steps in float32")
    weights = weights_after(reference, settings.warmup_steps)
    with backend_flags(low.policy, low.native_tf32):
        parts = build_parts(low)
        parts.model.load_state_dict(weights)
        samples, batches = _batches(parts, settings.batches)
        arithmetic = build_arithmetic(low)
        native = low.execution == "native"  # times of emulation say nothing about the hardware
        measured = sensitivity(
            parts.model,
            low.recipe.loss,
            batches,
            torch_dtype(low.policy.compute_dtype),
            modules=settings.modules,
            always=settings.always,
            timed_steps=settings.timed_steps if native else 0,
            arithmetic=arithmetic,
            loss_scales=loss_scales(low),
            report=report,
        )
        asked = Tolerance(settings.tolerance, settings.gradient_db)
        ops = measured.smallest_ops(asked)
        modules = measured.smallest_modules(asked) if ops.fp32 and settings.modules else None
        by_modules = _by_modules(ops, modules)
        given = CastPlan(build_caster(low), arithmetic=arithmetic)
        tolerance = asked.beside(measured.unavoidable)
        plan = measured.candidates.plan
        result = OpSearch(
            dtype=str(measured.candidates.dtype).removeprefix("torch."),
            measured_on=samples,
            tolerance=SearchTolerance(tolerance.loss, tolerance.gradient_db),
            unjudged_parameters=list(measured.probe.unjudged),
            zero_gradients=list(measured.probe.zero),
            reference=measured.probe.reference,
            unavoidable=RoundedWeights(measured.unavoidable),
            everything_lower=CastResult(measured.lower, time_ratio=1.0),
            given=GivenCasts(
                given_name(low), measured.probe.measure(given), measured.time_ratio(given)
            ),
            float32=Float32Time(measured.time_ratio(FLOAT32)),
            ops=[_row(effect, tolerance) for effect in measured.ops],
            modules=[_row(effect, tolerance) for effect in measured.modules],
            search=Selections(
                _selection(ops, measured, plan(ops.fp32)),
                _selection(modules, measured, plan(modules=modules.fp32)) if modules else None,
            ),
            always=list(measured.candidates.always),
            lower=list(measured.candidates.lower),
            answer="modules" if by_modules else "ops",
        )
    answer = modules if by_modules and modules else ops
    layers = dict.fromkeys(answer.fp32, "fp32") if by_modules else {}
    return result, SelectedCasts(answer.lists, layers, answer.measure.loss_scale)


def _by_modules(ops: Fp32List, modules: Fp32List | None) -> bool:
    """Whether modules are enough and leave less in float32 than the ops do."""
    if modules is None or not modules.search.is_within:
        return False
    return modules.float32_share < ops.float32_share


def _row(effect: OpEffect, tolerance: Tolerance) -> SensitivityRow:
    return SensitivityRow(
        name=effect.name,
        calls=effect.calls,
        harm_alone=tolerance.harm(effect.alone),
        alone=effect.alone,
        kept=effect.kept,
        time_ratio=effect.time_ratio,
    )


def _selection(smallest: Fp32List, measured: Sensitivity, plan: CastPlan) -> Fp32Selection:
    return Fp32Selection(
        fp32=list(smallest.fp32),
        is_within=smallest.search.is_within,
        harm=smallest.search.harm,
        measure=smallest.measure,
        float32_share=smallest.float32_share,
        time_ratio=measured.time_ratio(plan),
        steps=list(smallest.search.steps),
    )


def given_name(plan: Plan) -> str:
    """The name of a plan's casts."""
    return plan.config.op_lists.name if plan.op_lists is not None else plan.policy.casting


def loss_scales(plan: Plan) -> tuple[float, ...]:
    """The loss scales that a plan's may take, the largest first."""
    scale = build_loss_scale(plan.config, {}, torch.device("cpu"))
    if scale.tensor is None:
        return (1.0,)
    scales = [scale.tensor.item()]
    while scale.kind == "dynamic" and scales[-1] >= SCALE_STEP:
        scales.append(scales[-1] / SCALE_STEP)
    return tuple(scales)


def _batches(parts: Parts, wanted: int) -> tuple[Samples, list[Batch]]:
    """Batches of validation data of the training's size, smaller if there is less data."""
    held_out = len(parts.validation.data) > 0
    source = parts.validation if held_out else parts.train
    wanted = min(wanted, len(source.data))
    source.batch_size = min(parts.micro_batch, len(source.data) // wanted)
    batches = [(b.inputs, b.targets) for b in islice(source, wanted)]
    split = "validation" if held_out else "train"
    return Samples(split, len(batches), source.batch_size), batches
