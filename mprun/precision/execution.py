"""Whose kernels compute a mode on a device: PyTorch's, or mprun's emulation of the format.

Native execution takes PyTorch's kernels for the dtype. Emulation computes each op in float32 and
rounds its result. Some modes can only be emulated: `half_sr_full` everywhere, `tf32` without the
hardware. Where both are possible, `auto` takes native kernels unless they are so slow that float32
with rounding is faster.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from mprun.precision.arithmetic import (
    Arithmetic,
    EmulatedProducts,
    Float16Fallback,
    NativeArithmetic,
)
from mprun.precision.emulate import BlockedConvolutions, Emulated16
from mprun.precision.gemm_guard import NO_GUARD, GemmGuard
from mprun.precision.gemms import GEMMS, gemms_of, why_not_native
from mprun.precision.policy import Policy
from mprun.precision.rates import accelerated, slowdown
from mprun.precision.switches import EmulatedTf32, has_tf32
from mprun.records.layer_values import product_formats

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
    guard: str = "off",
) -> ExecutionChoice:
    """What was asked for; else native execution where it is possible and no slower than emulation.

    Args:
        wanted: auto, native or emulated.
        policy: the mode.
        device: where.
        speed: `speed=plain` takes the native kernels at any speed.
        layers: values of `precision.layers`; other formats than the mode's are emulated.
        guard: the action of the guard of products, which judges what the emulation computes.

    Raises:
        ValueError: the execution asked for is impossible, or no execution.
    """
    can, reason = executions(policy, device, layers, guard)
    if wanted not in ("auto", *EXECUTIONS):
        raise ValueError(f"execution={wanted}; legal: auto, {', '.join(can)}")
    if wanted != "auto" and wanted not in can:
        raise ValueError(f"execution={wanted}: {reason}; legal: auto, {', '.join(can)}")
    if wanted != "auto":
        return ExecutionChoice(wanted)
    if can[0] == "emulated":
        unguarded, _ = executions(policy, device, layers)
        return ExecutionChoice("emulated", None, reason, is_choice=unguarded[0] == "native")
    # float16 has `Float16Fallback`, which is as fast: only its slow ops are computed in float32.
    may_emulate = len(can) == 2 and policy.compute_dtype == "bfloat16" and speed != "plain"
    if device.type == "cpu" and may_emulate:
        times = slowdown(torch.bfloat16, device)
        if times >= EMULATED_FROM:
            return ExecutionChoice("emulated", times, _computed_in_float32(policy, times), True)
    return ExecutionChoice("native")


def _computed_in_float32(policy: Policy, times: float) -> str:
    dtype = policy.compute_dtype
    return (
        f"{dtype} is computed in float32 and rounded: native {dtype} kernels here take "
        f"{times:.1f} times as long as float32 (execution=native takes them)"
    )


def executions(
    policy: Policy, device: torch.device, layers: Collection[str] = (), guard: str = "off"
) -> tuple[tuple[str, ...], str]:
    """The possible executions of a policy, the best first, and why the other is impossible.

    Args:
        policy: the mode.
        device: where.
        layers, guard: as for `choose_execution`.
    """
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
        if why is None and guard != "off":
            why = (
                f"guard={guard} judges those factors, and native products do not show theirs "
                "(debug.guard=off takes native ones)"
            )
        return (
            (both, "")
            if why is None
            else (
                emulated,
                f"products are computed in float32, of factors rounded to their format: {why}",
            )
        )
    if policy.tf32:
        no = f"{device.type} here has no TensorFloat-32"
        return (both, "") if has_tf32(device) else (emulated, no)
    if policy.is_low:
        return both, ""
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
    return "backward" if _has_float16_matmuls(device) else "all"


def _has_float16_matmuls(device: torch.device) -> bool:
    """Whether matmuls have float16 instructions, by their time."""
    # With their own instructions they run near float32's speed, reference loops 50 times slower.
    return accelerated(torch.float16, device, tolerance=4.0)


def arithmetic_for(
    policy: Policy,
    execution: str,
    fp32_fallback: str,
    seed: int,
    watch: bool = True,
    guard: GemmGuard = NO_GUARD,
) -> Arithmetic:
    """The arithmetic of a policy.

    Args:
        policy: the mode.
        execution: native or emulated, as `choose_execution` gives it.
        fp32_fallback: none, backward or all, as `choose_fp32_fallback` gives it.
        seed: of stochastic rounding of every result.
        watch: list the 16-bit products of the first training step, for a record.
        guard: judges products with formats of 8 bits or fewer.
    """
    if policy.gemms != "none" and execution == "emulated":
        return EmulatedProducts(policy.gemms, seed, guard)
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
