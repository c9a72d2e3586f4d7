"""How float32 arithmetic is done: the backend switches.

PyTorch keeps process-wide switches that change what a "float32" matmul or convolution computes:
TensorFloat-32 on NVIDIA GPUs (by default off for matmuls, *on* for convolutions), bfloat16 inside
oneDNN on CPUs, reduced-precision accumulation in 16-bit matmuls. A run sets all of them from its
policy and puts them back on every way out. Only the interface of PyTorch 2.9 and later is used
(`fp32_precision`); mixing it with the older `allow_tf32` is an error in PyTorch.
"""

from __future__ import annotations

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
    with switches(native_tf32, policy.partials_dtype != "float32"):
        yield


@contextmanager
def switches(tf32: bool = False, reduced: bool = False) -> Iterator[None]:
    """Set the switches; restore them on the way out.

    Args:
        tf32: whether float32 matmuls and convolutions may be computed in TF32.
        reduced: whether 16-bit matmuls may accumulate in less than float32.
    """
    matmul = _B.cuda.matmul
    before_fp32 = [switch.fp32_precision for switch in _FP32_SWITCHES]
    before_reduction = [getattr(matmul, name) for name in _REDUCTION_SWITCHES]
    fp32 = "tf32" if tf32 else "ieee"
    try:
        for switch in _FP32_SWITCHES:
            switch.fp32_precision = fp32
        for name in _REDUCTION_SWITCHES:
            setattr(matmul, name, reduced)
        yield
    finally:
        for switch, precision in zip(_FP32_SWITCHES, before_fp32, strict=True):
            switch.fp32_precision = precision
        for name, allowed in zip(_REDUCTION_SWITCHES, before_reduction, strict=True):
            setattr(matmul, name, allowed)


def tf32_is_on(device: torch.device) -> bool:
    """Whether float32 matmuls on `device` are computed in TF32, by its hardware and the switch."""
    return has_tf32(device) and _B.cuda.matmul.fp32_precision == "tf32"


def has_tf32(device: torch.device) -> bool:
    """Whether the device has TensorFloat-32: NVIDIA's, from Ampere (compute capability 8.0) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
