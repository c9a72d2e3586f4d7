"""The summary of a run that starts: everything known before the first step."""

from __future__ import annotations

from typing import Any

import torch

from mprun.config.validate import GUARD, without_inert
from mprun.records.run_config import variant_hash
from mprun.records.run_record import (
    BackendRow,
    DataRow,
    FpExceptionsRow,
    GuardRow,
    LossScaleRow,
    Metric,
    ParallelRow,
    PrecisionRow,
    Summary,
)
from mprun.train.assemble import Plan, build_loss_scale
from mprun.train.assemble.optimizer import unused_by
from mprun.train.assemble.parts import build_guard, planned, requested
from mprun.train.assemble.plan import guard_action
from mprun.train.machine.heap import allocator
from mprun.train.recorder import new_summary


def initial_summary(
    plan: Plan,
    resolved: dict[str, Any],
    elapsed_s: float = 0.0,
    effective: PrecisionRow | None = None,
) -> Summary:
    """The summary of a run before its first step.

    Args:
        plan: the run's plan.
        resolved: its configuration.
        elapsed_s: seconds since the run's start-up began.
        effective: the precision that is carried out; None: that of the plan's objects.
    """
    config, splits = plan.config, plan.splits
    scale = build_loss_scale(config, plan.layers, torch.device("cpu"))
    initial = 1.0 if scale.tensor is None else scale.tensor.item()
    return new_summary(
        plan.device,
        [plan.policy.compute_dtype] if plan.policy.compute_dtype != "float32" else [],
        elapsed_s,
        sum(part.nbytes for part in (splits.train, splits.validation, splits.test)),
        recipe=config.recipe.name,
        recipe_sha256=None if plan.recipe_source is None else plan.recipe_source.sha256,
        seed=config.seed,
        precision=plan.policy.name,
        variant=variant_label(plan),
        variant_hash=variant_hash(without_inert(config, resolved, _unused(plan))),
        requested=requested(plan),
        effective=effective or planned(plan),
        execution=plan.execution,
        backend=BackendRow(
            memory_format=plan.speed.memory_format,
            optimizer_impl=plan.speed.optimizer_impl,
            compile=plan.speed.compile,
            threads=torch.get_num_threads(),
            allocator=allocator(),
            speed_trial=plan.speed_reason,
        ),
        data=DataRow(
            name=splits.name,
            source=splits.source,
            train_samples=splits.train.samples,
            validation_samples=splits.validation.samples,
            test_samples=splits.test.samples,
        ),
        batch=plan.batch,
        batch_size=plan.batch.effective,
        loss_scale=LossScaleRow(kind=scale.kind, initial=initial, final=initial),
        fp_exceptions=_fp_exceptions(plan),
        guard=_guard(plan),
        warnings=list(plan.warnings),
        parallel=ParallelRow(
            kind=config.parallel.name if config.parallel.world_size > 1 else "none",
            world_size=config.parallel.world_size,
        ),
        metric=Metric(
            name=plan.recipe.METRIC[0],
            higher_is_better=plan.recipe.METRIC[1] == "max",
        ),
    )


def _unused(plan: Plan) -> set[str]:
    """Fields without effect that only the plan knows."""
    unused = {*plan.recipe.ignores, *unused_by(plan.recipe)}
    return unused | ({*GUARD} if plan.policy.gemms == "none" else set())


def _guard(plan: Plan) -> GuardRow | None:
    guard = build_guard(plan)
    if guard.action == "off":
        return None
    return GuardRow(action=guard.action, thresholds=guard.thresholds, gemms=[])


def _fp_exceptions(plan: Plan) -> FpExceptionsRow | None:
    action = plan.config.debug.fp_exceptions
    if action == "off":
        return None
    return FpExceptionsRow(action=action, finding=0, expected=0, absorbed=0, dropped_steps=0)


def variant_label(plan: Plan) -> str:
    """A short name for tables: the mode and the differences to it."""
    factor, lists = plan.config.batch.factor, plan.config.op_lists
    files = (lists.lower_file, lists.fp32_file, lists.promote_file)
    label = plan.policy.name + (f"+{lists.name}" if plan.op_lists else "")
    label += "+files" if any(files) else ""
    label += "+skip" if plan.config.debug.fp_exceptions == "skip" else ""
    label += "+guard" if guard_action(plan.config, plan.policy) == "promote" else ""
    label += f" x{factor}" if factor > 1 else ""
    parallel = plan.config.parallel
    return label + (f" {parallel.name}-{parallel.world_size}" * (parallel.world_size > 1))
