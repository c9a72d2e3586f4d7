"""Choices that depend on the machine: device, execution, and ops whose kernels are too slow."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mprun.errors import UsageError
from mprun.precision import Policy, accelerated, has_tf32, slowdown


def choose_device(wanted: str) -> torch.device:
    """The device; `auto` is CUDA if there is a CUDA device."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("device=cuda: PyTorch finds no CUDA device here; legal: auto, cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


EMULATED_FROM = 2.0
"""How many times as long as float32 native kernels take where emulation is taken instead. A step of
emulation takes about 1.4 times float32's; the margin is wide, so that noise rarely decides."""


class ExecutionChoice(NamedTuple):
    """native or emulated, and why."""

    name: str
    slowdown: float | None = None
    """How many times as long as float32 the native kernels take here, if that decided."""
    why_emulated: str | None = None
    """A sentence; None for native execution, and where the user chose."""


def choose_execution(
    wanted: str, policy: Policy, device: torch.device, speed: str = "auto"
) -> ExecutionChoice:
    """What was asked for; else native execution where it is possible and no slower than emulation.

    Args:
        wanted: auto, native or emulated.
        policy: the mode.
        device: where.
        speed: `speed=plain` takes the native kernels at any speed.

    Raises:
        UsageError: the execution asked for is impossible.
    """
    can, reason = executions(policy, device)
    if wanted != "auto" and wanted not in can:
        raise UsageError(f"execution={wanted}: {reason}; legal: auto, {', '.join(can)}")
    if wanted != "auto":
        return ExecutionChoice(wanted)
    if can[0] == "emulated":
        return ExecutionChoice("emulated", why_emulated=reason)
    # float16 has `Float16Fallback`, which is as fast: only its slow ops are computed in float32.
    may_emulate = len(can) == 2 and policy.compute_dtype == "bfloat16" and speed != "plain"
    if device.type == "cpu" and may_emulate:
        times = slowdown(torch.bfloat16, device)
        if times >= EMULATED_FROM:
            return ExecutionChoice("emulated", times, _computed_in_float32(policy, times))
    return ExecutionChoice("native")


def _computed_in_float32(policy: Policy, times: float) -> str:
    dtype = policy.compute_dtype
    return (
        f"{dtype} is computed in float32 and rounded: native {dtype} kernels here take "
        f"{times:.1f} times as long as float32 (execution=native takes them)"
    )


def executions(policy: Policy, device: torch.device) -> tuple[tuple[str, ...], str]:
    """The possible executions of a policy, the best first, and why the other is impossible."""
    emulated, both = ("emulated",), ("native", "emulated")
    if policy.rounding_scope == "all":
        return emulated, (
            "precision.rounding_scope=all rounds every result stochastically, and a kernel's "
            "result is already rounded to nearest"
        )
    if policy.partials_dtype == "float16" and device.type != "cuda":
        return emulated, (
            "precision.partials_dtype=float16: CPU kernels have no switch for their accumulation"
        )
    if policy.tf32:
        no = f"{device.type} here has no TensorFloat-32"
        return (both, "") if has_tf32(device) else (emulated, no)
    if policy.is_low:
        return both, ""
    no = f"precision={policy.name} runs natively on every device and has no emulation"
    return ("native",), no


def choose_fp32_fallback(speed: str, policy: Policy, execution: str, device: torch.device) -> str:
    """Which float16 ops a CPU computes in float32: none, backward (convolutions') or all.

    `speed=plain` keeps every kernel, and emulation has none. Else it depends on whether this
    machine has float16 instructions for matmuls, which is measured.
    """
    native = execution == "native" and policy.compute_dtype == "float16"
    if speed == "plain" or not native or device.type != "cpu":
        return "none"
    # Kernels with their own instructions run near float32's speed, reference loops 50 times slower.
    return "backward" if accelerated(torch.float16, device, tolerance=4.0) else "all"
