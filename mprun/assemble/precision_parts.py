"""The parts that carry out a policy: caster, arithmetic, loss scale, detection of exceptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from mprun.assemble.plan import Plan, guard_action
from mprun.config import Config, schema
from mprun.config.validate import loss_scale_kind
from mprun.numerics.nonfinite import RunExceptions, WatchedRunExceptions
from mprun.parallel.ranks import Ranks
from mprun.precision import Arithmetic, Caster, Clip, DynamicRule, LossScale, Precision
from mprun.precision.caster import caster_of
from mprun.precision.combine import ALONE, Combine
from mprun.precision.execution import arithmetic_for
from mprun.precision.gemm_guard import GemmFinding, GemmGuard, guard_of
from mprun.precision.loss_scale import loss_scale_of_kind
from mprun.precision.op_lists import Watcher
from mprun.train.process_exceptions import of_all_processes


def build_precision(
    plan: Plan,
    caster: Caster | None = None,
    arithmetic: Arithmetic | None = None,
    make: Callable[..., Precision] = Precision.of_parts,
    combine: Combine = ALONE,
) -> Precision:
    """What carries out the plan's policy.

    Args:
        plan: the plan.
        caster: replaces the plan's, which decides the dtypes of ops.
        arithmetic: replaces the plan's, which decides whose kernels compute.
        make: a function with the arguments of `Precision.of_parts`.
        combine: what processes with shards agree on norms and overflows by.
    """
    return make(
        plan.policy,
        caster or build_caster(plan),
        arithmetic or build_arithmetic(plan),
        build_loss_scale(plan.config, plan.layers, plan.device),
        Clip(plan.config.train.clip_norm, combine),
        layers=plan.layers,
    )


def build_exceptions(plan: Plan, ranks: Ranks | None = None) -> RunExceptions:
    """The detection of floating-point exceptions that `debug.fp_exceptions` asks for.

    Args:
        plan: the plan.
        ranks: the processes that train together; None: one.
    """
    debug = plan.config.debug
    if debug.fp_exceptions is schema.FpExceptions.off:
        return RunExceptions()
    saturates = plan.policy.overflow == "saturate"
    share = partial(of_all_processes, ranks or Ranks())
    return WatchedRunExceptions(debug.fp_exceptions.name, debug.halt_after, saturates, share)


def build_caster(plan: Plan, watcher: Watcher | None = None) -> Caster:
    """What decides the dtypes of ops; `watcher` is notified of the casts of op lists."""
    several = plan.batch.accumulate > 1
    return caster_of(plan.policy, plan.device.type, plan.op_lists, keep=several, watcher=watcher)


def build_arithmetic(plan: Plan, ranks: Ranks | None = None) -> Arithmetic:
    """Whose kernels compute: PyTorch's or mprun's.

    Args:
        plan: the plan.
        ranks: the processes that train together; None: one. Each rounds its own samples' results
            with bits of its own.
    """
    ranks = ranks or Ranks()
    seed = plan.config.seed + (ranks.rank << 32)  # a seed of a run has 32 bits
    guard = build_guard(plan, ranks)
    return arithmetic_for(plan.policy, plan.execution, plan.fp32_fallback, seed, guard=guard)


def build_guard(plan: Plan, ranks: Ranks | None = None) -> GemmGuard:
    """The guard of products with formats of 8 bits or fewer.

    Each process decides about the products of its own samples. What they found is counted together.

    Args:
        plan: the plan.
        ranks: the processes that train together; None: one.
    """
    debug, shared = plan.config.debug, ranks or Ranks()

    def of_all_processes(own: list[GemmFinding]) -> list[GemmFinding]:
        if not any(shared.agree(bool(own))):
            return []
        return [finding for found in shared.gather(own) for finding in found]

    action = guard_action(plan.config, plan.policy)
    return guard_of(action, debug.guard_underflow, debug.guard_error, of_all_processes)


def build_loss_scale(config: Config, layers: Mapping[str, str], device: torch.device) -> LossScale:
    """The loss scale of the configuration, or the one that the mode or a layer needs."""
    scale, kind = config.loss_scale, loss_scale_kind(config, layers.values())
    rule = DynamicRule(
        scale.growth_factor, scale.backoff_factor, scale.growth_interval, scale.floor
    )
    return loss_scale_of_kind(kind, scale.value, device, rule)
