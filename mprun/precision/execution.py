"""Whose kernels compute a mode on a device: PyTorch's, or mprun's emulation of the format.

Some modes can only be emulated: `half_sr_full` everywhere, `tf32` without the hardware. Where both
are possible, `auto` takes native kernels unless they are so slow that float32 with rounding is
faster. The second half makes the parts of a `Precision` from plain arguments: what is not given is
decided by the policy and the machine, as in a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from mprun.precision import devices
from mprun.precision._torch_switches import has_tf32
from mprun.precision.arithmetic import (
    Arithmetic,
    EmulatedProducts,
    EmulatedTf32,
    Float16Fallback,
    NativeArithmetic,
)
from mprun.precision.caster import Caster, caster_of
from mprun.precision.emulate import BlockedConvolutions, Emulated16
from mprun.precision.gemms import GEMMS, gemms_of, why_not_native
from mprun.precision.loss_scale import LOSS_SCALES, LossScale, StaticLossScale, loss_scale_of_kind
from mprun.precision.op_lists import OpLists
from mprun.precision.op_lists.lists import SHIPPED, shipped_lists
from mprun.precision.policy import Policy
from mprun.precision.rates import accelerated, slowdown
from mprun.records.layer_values import computes_float16, product_formats

EXECUTIONS = ("native", "emulated")
# How many times as long as float32 native kernels take where emulation is taken instead. A step of
# emulation takes about 1.4 times float32's; the margin is wide, so that noise rarely decides.
EMULATED_FROM = 2.0


class ExecutionChoice(NamedTuple):
    """native or emulated, and why."""

    name: str
    slowdown: float | None = None
    """How many times as long as float32 the native kernels take here, if that decided."""
    why_emulated: str | None = None
    """A sentence; None for native execution, and where the user chose."""
    is_choice: bool = False  # Whether native execution is possible without what decided


def choose_execution(
    wanted: str,
    policy: Policy,
    device: torch.device,
    speed: str = "auto",
    layers: Collection[str] = (),
) -> ExecutionChoice:
    """What was asked for; else native execution where it is possible and no slower than emulation.

    `speed="plain"` takes the native kernels at any speed. `layers` are values of
    `precision.layers`, which may need emulation.

    Raises:
        ValueError: the execution asked for is impossible, or no execution.
    """
    can, reason = executions(policy, device, layers)
    if wanted not in ("auto", *EXECUTIONS):
        raise ValueError(f"execution={wanted}; legal: auto, {', '.join(can)}")
    if wanted != "auto" and wanted not in can:
        raise ValueError(f"execution={wanted}: {reason}; legal: auto, {', '.join(can)}")
    # Before the trial below, which takes time: who chose needs none
    if wanted != "auto":
        return ExecutionChoice(wanted)
    if can[0] == "emulated":
        return ExecutionChoice("emulated", None, reason)
    # float16 has `Float16Fallback`, which is as fast: only its slow ops are computed in float32.
    may_emulate = len(can) == 2 and policy.compute_dtype == "bfloat16" and speed != "plain"
    if device.type == "cpu" and may_emulate:
        times = slowdown(torch.bfloat16, device)
        if times >= EMULATED_FROM:
            why = (
                "bfloat16 is computed in float32 and rounded: native bfloat16 kernels here take "
                f"{times:.1f} times as long as float32 (execution=native takes them)"
            )
            return ExecutionChoice("emulated", times, why, is_choice=True)
    return ExecutionChoice("native")


def executions(
    policy: Policy, device: torch.device, layers: Collection[str] = ()
) -> tuple[tuple[str, ...], str]:
    """The possible executions of a policy, the best first, and why the other is impossible."""
    emulated, both = ("emulated",), EXECUTIONS
    if policy.rounding_scope == "all":
        return emulated, (
            "precision.rounding_scope=all rounds every result stochastically, and a kernel's "
            "result is already rounded to nearest"
        )
    if policy.has_low_partials and device.type != "cuda":
        return emulated, (
            "precision.partials_dtype=float16: CPU kernels have no switch for their accumulation"
        )
    if policy.gemms != "none":
        why = why_not_native(policy.gemms, device) or _own_products(policy, layers)
        how = "products are computed in float32, of factors rounded to their format"
        return (both, "") if why is None else (emulated, f"{how}: {why}")
    if policy.tf32:
        no = f"{device.type} here has no TensorFloat-32"
        return (both, "") if has_tf32(device) else (emulated, no)
    if policy.is_low:
        return both, ""
    if policy.param_dtype == "float64" and device.type == "mps":
        raise ValueError(
            f"precision={policy.name} with device=mps, which has no float64; legal: device=cpu"
        )
    no = f"precision={policy.name} runs natively on every device and has no emulation"
    return ("native",), no


def _own_products(policy: Policy, layers: Collection[str]) -> str | None:
    """Why products that are not those of the mode are emulated; None where all are."""
    named = filter(None, map(product_formats, layers))
    if policy.hadamard or any(gemms_of(x) != GEMMS[policy.gemms] for x in named):
        return "mprun has no native products of single layers or after a Hadamard transform"
    return None


def choose_fp32_fallback(speed: str, policy: Policy, execution: str, device: torch.device) -> str:
    """Which float16 ops a CPU computes in float32: none, backward (convolutions') or all.

    `speed=plain` keeps every kernel, and emulation has none. Else it depends on whether this
    machine has float16 instructions for matmuls, which is measured.
    """
    native = execution == "native" and policy.compute_dtype == "float16"
    if speed == "plain" or not native or device.type != "cpu":
        return "none"
    # With instructions matmuls run near float32's speed, as reference loops 50 times slower.
    return "backward" if accelerated(torch.float16, device, tolerance=4.0) else "all"


def arithmetic_for(
    policy: Policy,
    execution: str,
    fp32_fallback: str,
    seed: int,
    watch: bool = True,
) -> Arithmetic:
    """The arithmetic of a policy, as `choose_execution` and `choose_fp32_fallback` chose it.

    `seed` is that of stochastic rounding of every result; `watch` lists the 16-bit products of the
    first training step, for a record.
    """
    if policy.gemms != "none" and execution == "emulated":
        return EmulatedProducts(policy.gemms, seed)
    if policy.tf32 and execution == "emulated":
        return EmulatedTf32()
    if execution == "emulated":
        rounding = policy.rounding if policy.rounding_scope == "all" else "nearest"
        return Emulated16(rounding, policy.overflow, policy.partials_dtype, seed)
    if policy.has_low_partials:
        return BlockedConvolutions()
    if fp32_fallback != "none":
        return Float16Fallback(matmuls=fp32_fallback == "all")
    return NativeArithmetic(watch=watch and policy.is_low)


def device_of(given: torch.device | str | None) -> torch.device:
    """The device; None is the accelerator if there is one, else the CPU.

    Raises `ValueError` if this machine has no such device.
    """
    if given == torch.device("meta"):  # shapes alone, of a plan that nothing computes
        return torch.device("meta")
    return devices.find("auto" if given is None else str(given))


def chosen_caster(
    policy: Policy, given: OpLists | Caster | str | None, device_type: str
) -> tuple[Policy, Caster]:
    """The policy, which casts by op lists if lists or their name are given, and its caster.

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
    """The loss scale that is asked for: see `Precision`; `layers` are values of `precision.layers`.

    Raises:
        ValueError: it is none; or a dynamic one with `overflow="saturate"`.
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
) -> Arithmetic:
    """Whose kernels compute, chosen as a run does; a warning says why they are emulated.

    `execution` may be the arithmetic itself.

    Raises:
        ValueError: the execution is impossible for the mode on this device.
    """
    if isinstance(execution, Arithmetic):
        return execution
    choice = choose_execution(execution, policy, device, layers=layers)
    if choice.why_emulated is not None:
        warnings.warn(
            f"precision={policy.name} is emulated: {choice.why_emulated}; execution='emulated' "
            "does so without this warning",
            stacklevel=3,
        )
    speed = "plain" if execution == "native" else "auto"
    fallback = choose_fp32_fallback(speed, policy, choice.name, device)
    return arithmetic_for(policy, choice.name, fallback, seed, watch=False)
