"""The parts of a `Precision`, from the plain arguments of anyone's own loop.

A run makes its arithmetic and its caster itself, and gives these. What is not given is decided by
the policy and the machine, as in a run: the device, whose kernels compute, the loss scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from mprun.precision import devices
from mprun.precision.arithmetic import Arithmetic
from mprun.precision.caster import Caster, caster_of
from mprun.precision.execution import arithmetic_for, choose_execution, choose_fp32_fallback
from mprun.precision.gemm_guard import NO_GUARD, GemmGuard
from mprun.precision.loss_scale import LOSS_SCALES, LossScale, StaticLossScale, loss_scale_of_kind
from mprun.precision.op_lists import OpLists
from mprun.precision.op_lists.lists import SHIPPED, shipped_lists
from mprun.precision.policy import Policy, policy
from mprun.records.layer_values import computes_float16


def policy_of(given: Policy | str) -> Policy:
    """A policy itself, or that of a mode's name.

    Raises:
        TypeError: it is neither.
        ValueError: no mode has this name.
    """
    if not isinstance(given, Policy | str):
        raise TypeError(
            f"a policy of type {type(given).__name__}; legal: the name of a mode, such as "
            "'bf16_sr', or what mprun.policy(name) gives"
        )
    return given if isinstance(given, Policy) else policy(given)


def device_of(given: torch.device | str | None) -> torch.device:
    """The device; None is the accelerator if there is one, else the CPU.

    Raises:
        ValueError: this machine has no such device.
    """
    if given == torch.device("meta"):  # shapes alone, of a plan that nothing computes
        return torch.device("meta")
    return devices.find("auto" if given is None else str(given))


def chosen_caster(
    policy: Policy, given: OpLists | Caster | str | None, device_type: str
) -> tuple[Policy, Caster]:
    """The policy, which casts by op lists if lists are given, and what decides the casts.

    Args:
        policy: casts, if lists are given.
        given: lists, the name of shipped ones, or the caster itself; None: as the policy says.
        device_type: see `shipped_lists`.

    Raises:
        ValueError: no lists have this name, the mode casts nothing, or its casting needs lists.
    """
    if isinstance(given, Caster):
        return policy, given
    if given is None:
        if policy.casting == "op_lists":
            raise ValueError(
                f"precision={policy.name} with casting=op_lists needs op_lists=...; legal: "
                f"{', '.join(map(repr, SHIPPED))}, or what mprun.precision.op_lists(...) gives"
            )
        return policy, caster_of(policy, device_type)
    if not policy.casts:
        raise ValueError(
            f"op_lists with precision={policy.name}, which casts no op; legal: bf16_mixed, "
            "fp16_mixed"
        )
    lists = shipped_lists(given, device_type) if isinstance(given, str) else given
    policy = replace(policy, casting="op_lists")
    return policy, caster_of(policy, device_type, lists)


def loss_scale_of(
    given: LossScale | str | float, policy: Policy, layers: Iterable[str], device: torch.device
) -> LossScale:
    """The loss scale that is asked for.

    Args:
        given: auto (dynamic if the mode or a layer computes in float16, else none), none, static,
            dynamic, or the factor of a static one.
        policy: the mode.
        layers: dtypes or modes of layers.
        device: where the gradients are.

    Raises:
        ValueError: none of those; or a dynamic one with `overflow="saturate"`.
    """
    if isinstance(given, LossScale):
        return given
    if isinstance(given, int | float):
        if not given > 0:
            raise ValueError(f"loss_scale={given}; legal is a number above 0")
        return StaticLossScale(float(given), device)
    kind = given
    if kind == "auto":
        needed = policy.compute_dtype == "float16" or any(map(computes_float16, layers))
        kind = "dynamic" if needed else "none"
    if kind not in LOSS_SCALES:
        raise ValueError(
            f"loss_scale={given!r}; legal: auto, {', '.join(LOSS_SCALES)}, or the factor of a "
            "static one"
        )
    if kind == "dynamic" and policy.overflow == "saturate":
        raise ValueError(
            f"precision={policy.name} with overflow=saturate and a dynamic loss scale, which needs "
            "to see the overflows that saturation hides; legal: loss_scale='static' or 'none'"
        )
    return loss_scale_of_kind(kind, None, device)


def chosen_arithmetic(
    policy: Policy,
    execution: Arithmetic | str,
    device: torch.device,
    seed: int,
    layers: Collection[str] = (),
    guard: GemmGuard = NO_GUARD,
) -> Arithmetic:
    """Whose kernels compute, chosen as a run does; a warning says why they are emulated.

    Args:
        policy: the mode.
        execution: auto, native (every kernel for the dtype, however slow) or emulated; or the
            arithmetic itself.
        device: where.
        seed: of stochastic rounding of every result.
        layers: values of `precision.layers`.
        guard: judges products with formats of 8 bits or fewer; a warning says if there are none.

    Raises:
        ValueError: the execution is impossible for the mode on this device.
    """
    if isinstance(execution, Arithmetic):
        return execution
    chosen = choose_execution(execution, policy, device, layers=layers, guard=guard.action)
    if guard.action != "off" and policy.gemms == "none":
        warnings.warn(
            f"guard={guard.action!r} has no effect: precision={policy.name} has no products in "
            "formats of 8 bits or fewer",
            stacklevel=3,
        )
    if chosen.why_emulated is not None:
        warnings.warn(
            f"precision={policy.name} is emulated: {chosen.why_emulated}; execution='emulated' "
            "does so without this warning",
            stacklevel=3,
        )
    speed = "plain" if execution == "native" else "auto"
    fallback = choose_fp32_fallback(speed, policy, chosen.name, device)
    return arithmetic_for(policy, chosen.name, fallback, seed, watch=False, guard=guard)
