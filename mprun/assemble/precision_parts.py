"""The parts that carry out a policy: caster, arithmetic, loss scale, detection of exceptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mprun.assemble.plan import Plan
from mprun.config import Config, schema
from mprun.config.validate import loss_scale_kind
from mprun.numerics.nonfinite import RunExceptions, WatchedRunExceptions
from mprun.precision import Arithmetic, Caster, Clip, DynamicRule, LossScale, Precision
from mprun.precision.caster import caster_of
from mprun.precision.execution import arithmetic_for
from mprun.precision.loss_scale import loss_scale_of_kind
from mprun.precision.op_lists import Watcher


def build_precision(
    plan: Plan,
    caster: Caster | None = None,
    arithmetic: Arithmetic | None = None,
    make: Callable[..., Precision] = Precision.of_parts,
) -> Precision:
    """What carries out the plan's policy.

    Args:
        plan: the plan.
        caster: replaces the plan's, which decides the dtypes of ops.
        arithmetic: replaces the plan's, which decides whose kernels compute.
        make: a function with the arguments of `Precision.of_parts`.
    """
    return make(
        plan.policy,
        caster or build_caster(plan),
        arithmetic or build_arithmetic(plan),
        build_loss_scale(plan.config, plan.layers, plan.device),
        Clip(plan.config.train.clip_norm),
        layers=plan.layers,
    )


def build_exceptions(plan: Plan) -> RunExceptions:
    """The detection of floating-point exceptions that `debug.fp_exceptions` asks for."""
    debug = plan.config.debug
    if debug.fp_exceptions is schema.FpExceptions.off:
        return RunExceptions()
    saturates = plan.policy.overflow == "saturate"
    return WatchedRunExceptions(debug.fp_exceptions.name, debug.halt_after, saturates)


def build_caster(plan: Plan, watcher: Watcher | None = None) -> Caster:
    """What decides the dtypes of ops; `watcher` is notified of the casts of op lists."""
    several = plan.batch.accumulate > 1
    return caster_of(plan.policy, plan.device.type, plan.op_lists, keep=several, watcher=watcher)


def build_arithmetic(plan: Plan) -> Arithmetic:
    """Whose kernels compute: PyTorch's or mprun's."""
    return arithmetic_for(plan.policy, plan.execution, plan.fp32_fallback, plan.config.seed)


def build_loss_scale(config: Config, layers: Mapping[str, str], device: torch.device) -> LossScale:
    """The loss scale of the configuration, or the one that the mode or a layer needs."""
    scale, kind = config.loss_scale, loss_scale_kind(config, layers.values())
    rule = DynamicRule(
        scale.growth_factor, scale.backoff_factor, scale.growth_interval, scale.floor
    )
    return loss_scale_of_kind(kind, scale.value, device, rule)
