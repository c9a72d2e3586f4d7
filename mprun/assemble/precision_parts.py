"""The parts that carry out a policy: caster, arithmetic, loss scale, detection of exceptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mprun.assemble.plan import Plan
from mprun.config import Config, schema
from mprun.config.validate import loss_scale_kind
from mprun.numerics.nonfinite import RunExceptions, WatchedRunExceptions
from mprun.precision import (
    Arithmetic,
    BlockedConvolutions,
    Caster,
    Clip,
    DynamicLossScale,
    DynamicRule,
    Emulated16,
    EmulatedTf32,
    Float16Fallback,
    LossScale,
    NativeArithmetic,
    NoLossScale,
    Policy,
    Precision,
    StaticLossScale,
)
from mprun.precision.caster import caster_of
from mprun.precision.op_lists import Watcher

DEFAULT_STATIC = 1024.0
DEFAULT_INITIAL = 2.0**16


def build_precision(
    plan: Plan,
    caster: Caster | None = None,
    arithmetic: Arithmetic | None = None,
    make: Callable[..., Precision] = Precision,
) -> Precision:
    """What carries out the plan's policy.

    Args:
        plan: the plan.
        caster: replaces the plan's, which decides the dtypes of ops.
        arithmetic: replaces the plan's, which decides whose kernels compute.
        make: a class or function with the arguments of `Precision`.
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


def arithmetic_for(policy: Policy, execution: str, fp32_fallback: str, seed: int) -> Arithmetic:
    """The arithmetic of a policy; the arguments are fields of `Plan`."""
    if policy.tf32 and execution == "emulated":
        return EmulatedTf32()
    if execution == "emulated":
        rounding = policy.rounding if policy.rounding_scope == "all" else "nearest"
        return Emulated16(rounding, policy.overflow, policy.partials_dtype, seed)
    if policy.partials_dtype == "float16":
        return BlockedConvolutions()
    if fp32_fallback != "none":
        return Float16Fallback(matmuls=fp32_fallback == "all")
    return NativeArithmetic(watch=policy.is_low)


def build_loss_scale(config: Config, layers: Mapping[str, str], device: torch.device) -> LossScale:
    """The loss scale of the configuration, or the one that the mode or a layer needs."""
    scale, kind = config.loss_scale, loss_scale_kind(config, layers.values())
    if kind == "static":
        return StaticLossScale(DEFAULT_STATIC if scale.value is None else scale.value, device)
    if kind == "dynamic":
        rule = DynamicRule(
            scale.growth_factor, scale.backoff_factor, scale.growth_interval, scale.floor
        )
        initial = DEFAULT_INITIAL if scale.value is None else scale.value
        return DynamicLossScale(initial, rule, device)
    return NoLossScale()
