"""How the arithmetic is done: backend switches, and whether the hardware speeds a dtype up.

PyTorch keeps process-wide switches that change what a "float32" matmul or convolution computes:
TensorFloat-32 on NVIDIA GPUs (by default off for matmuls, *on* for convolutions), bfloat16 inside
oneDNN on CPUs, reduced-precision accumulation in 16-bit matmuls. A run sets all of them from its
policy and puts them back on every way out. Only the interface of PyTorch 2.9 and later is used
(`fp32_precision`); mixing it with the older `allow_tf32` is an error in PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mprun.precision.policy import Policy

_B: Any = torch.backends
_FP32_SWITCHES: tuple[Any, ...] = (
    _B.cuda.matmul,
    _B.cudnn.conv,
    _B.cudnn.rnn,
    _B.mkldnn.matmul,
    _B.mkldnn.conv,
    _B.mkldnn.rnn,
)
_REDUCTION_SWITCHES = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def backend_flags(policy: Policy, native_tf32: bool = False) -> Iterator[None]:
    """Set the process-wide switches to what `policy` says; restore them on the way out.

    float32 arithmetic is IEEE unless `native_tf32`, for a TF32 policy on hardware that has it
    (emulation rounds around IEEE arithmetic); float32 partials switch the reduced-precision
    reductions of 16-bit matmuls off, float16 partials switch accumulation in float16 on.
    """
    matmul = _B.cuda.matmul
    before_fp32 = [switch.fp32_precision for switch in _FP32_SWITCHES]
    before_reduction = [getattr(matmul, name) for name in _REDUCTION_SWITCHES]
    fp32 = "tf32" if native_tf32 else "ieee"
    try:
        for switch in _FP32_SWITCHES:
            switch.fp32_precision = fp32
        for name in _REDUCTION_SWITCHES:
            setattr(matmul, name, policy.partials_dtype != "float32")
        yield
    finally:
        for switch, precision in zip(_FP32_SWITCHES, before_fp32, strict=True):
            switch.fp32_precision = precision
        for name, allowed in zip(_REDUCTION_SWITCHES, before_reduction, strict=True):
            setattr(matmul, name, allowed)


def has_tf32(device: torch.device) -> bool:
    """Whether the device has TensorFloat-32: NVIDIA's, from Ampere (compute capability 8.0) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def accelerated(
    dtype: torch.dtype, device: torch.device, side: int = 256, tolerance: float = 1.0
) -> bool:
    """Whether a matmul in `dtype` is faster here than in float32, by a short measurement.

    Having a kernel for a dtype and having hardware for it are two things: on a CPU without
    AMX-BF16 or AVX512-BF16, bfloat16 runs, up to a hundred times slower than float32. The sizes are
    small enough that even this takes a fraction of a second.

    Args:
        dtype: the dtype in question.
        device: where.
        side: matmuls are of [side, side] by [side, side].
        tolerance: how many times float32's time still counts.
    """
    if dtype == torch.float32:
        return True
    threads = torch.get_num_threads()
    # Several threads beside another process slow down tenfold, now one dtype and now the other.
    torch.set_num_threads(1)
    try:
        return _faster(dtype, device, side, tolerance)
    finally:
        torch.set_num_threads(threads)


def _faster(dtype: torch.dtype, device: torch.device, side: int, tolerance: float) -> bool:
    return _matmul_s(dtype, device, side) < tolerance * _matmul_s(torch.float32, device, side)


def _matmul_s(dtype: torch.dtype, device: torch.device, side: int) -> float:
    """The fastest of five matmuls, in seconds, after one that warms up."""
    a = torch.ones(side, side, dtype=dtype, device=device)
    times = []
    for _ in range(6):
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
