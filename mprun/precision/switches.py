"""How float32 arithmetic is done: the backend switches.

PyTorch has process-wide switches that change what a "float32" matmul or convolution computes:
TensorFloat-32 on NVIDIA GPUs (by default off for matmuls, *on* for convolutions), bfloat16 inside
oneDNN on CPUs, reduced-precision accumulation in 16-bit matmuls. A run sets all of them from its
policy and restores them however it ends.

They have two interfaces, `fp32_precision` and the older `allow_tf32`. PyTorch raises an error if
the two disagree. Both are set, so that a model's code can use either (`torch.backends.cudnn.flags`
uses both). If such code sets a switch, it is reset at once, with a warning: a run computes in its
mode, as its record states.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mprun._torch import BackendSwitches, backend_switches, on_backend_switch, set_backend_switches
from mprun.precision.policy import Policy


@contextmanager
def backend_flags(policy: Policy, native_tf32: bool = False) -> Iterator[None]:
    """Set the process-wide switches as `policy` needs them; restore them at the end.

    float32 arithmetic is IEEE unless `native_tf32`, for a TF32 policy on hardware that has it
    (emulation rounds around IEEE arithmetic); float32 partials switch the reduced-precision
    reductions of 16-bit matmuls off, float16 partials switch accumulation in float16 on.
    """
    with switches(native_tf32, policy.partials_dtype != "float32"):
        yield


@contextmanager
def switches(tf32: bool = False, reduced: bool = False) -> Iterator[None]:
    """Set the switches; restore them at the end.

    Args:
        tf32: whether float32 matmuls and convolutions may be computed in TF32.
        reduced: whether 16-bit matmuls may accumulate in less than float32.
    """
    before = backend_switches()
    wanted = BackendSwitches.all_at("tf32" if tf32 else "ieee", reduced)
    reported: set[str] = set()

    def restore() -> None:
        changes = backend_switches().changes(wanted)
        set_backend_switches(wanted)
        for change in changes:
            if change not in reported:
                reported.add(change)
                warnings.warn(
                    f"the model's code set {change} during a run; the run keeps that of its mode",
                    stacklevel=4,
                )

    try:
        set_backend_switches(wanted)
        with on_backend_switch(restore):
            yield
        restore()  # switches that were set past the followed setters
    finally:
        set_backend_switches(before)


def tf32_is_on(device: torch.device) -> bool:
    """Whether float32 matmuls on `device` are computed in TF32, by its hardware and the switch."""
    return has_tf32(device) and torch.backends.cuda.matmul.fp32_precision == "tf32"


def has_tf32(device: torch.device) -> bool:
    """Whether the device has TensorFloat-32: NVIDIA's, from Ampere (compute capability 8.0) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
