"""An estimate of a recipe's step on several processes, from its roofline in a single one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mprun.assemble.planned_memory import (
    as_native,
    fake_step,
    gathered_itemsizes,
)
from mprun.doctor.scaling import estimate_scaling, sent_bytes
from mprun.experiments.planned_run import PlannedRun
from mprun.experiments.recipe_roofline import real_step
from mprun.precision.policy import Policy, torch_dtype
from mprun.records.memory_record import ParallelKind
from mprun.records.roofline_record import Roofline
from mprun.records.scaling_record import ScalingEstimate


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
    parameters, gradients = _model_bytes(planned, plan.policy)
    measured_ms = roof.step_time_ms.median if roof.execution == "native" else None
    return estimate_scaling(
        parallel=parallel,
        world_size=world_size,
        compute_ms=roof.least_ms if measured_ms is None else measured_ms,
        compute_from="least time" if measured_ms is None else "measured step",
        gather_dtype=plan.policy.compute_dtype if parallel == "fsdp2" else None,
        reduce_dtype=plan.policy.reduce_dtype,
        nbytes=sent_bytes(parallel, world_size, parameters, gradients, plan.batch.accumulate),
        links=links,
    )


def _model_bytes(planned: PlannedRun, policy: Policy) -> tuple[int, int]:
    """Bytes of the parameters as they are gathered, and of the gradients as they are reduced."""
    try:
        with fake_step(as_native(planned.plan)) as (parts, _):
            return _bytes(parts.model, policy)
    except Exception:  # a model that reads values has been measured on real tensors
        with real_step(planned) as (parts, _):
            return _bytes(parts.model, policy)


def _bytes(model: nn.Module, policy: Policy) -> tuple[int, int]:
    cast = gathered_itemsizes(model, policy)
    parameters = [(name.rpartition(".")[0], p) for name, p in model.named_parameters()]
    return (
        sum(p.numel() * min(p.itemsize, cast.get(owner, p.itemsize)) for owner, p in parameters),
        sum(p.numel() for _, p in parameters if p.requires_grad)
        * torch_dtype(policy.reduce_dtype).itemsize,
    )
