"""How float32 arithmetic is done: the backend switches.

PyTorch has process-wide switches that change what a "float32" matmul or convolution computes:
TensorFloat-32 on NVIDIA GPUs (by default off for matmuls, *on* for convolutions), bfloat16 inside
oneDNN on CPUs, reduced-precision accumulation in 16-bit matmuls. A run sets all of them from its
policy and restores them however it ends.

They have two interfaces, `fp32_precision` and the older `allow_tf32`. PyTorch raises an error if
the two disagree. Both are set, so that a model's code can use either (`torch.backends.cudnn.flags`
uses both). If such code sets a switch, it is reset at once, with a warning: a run computes in its
mode, as its record states.

**TensorFloat-32** (NVIDIA, "TensorFloat-32 in the A100 GPU"): matmuls and convolutions take float32
inputs rounded to a 10-bit mantissa, with float32's 8-bit exponent; products and sums are float32.
Without such hardware mprun rounds the inputs of those ops, gradients included. The format is the
same; the order of the sums is the CPU's. A kernel that cannot be opened (`products.py`) computes in
float32. mprun warns of it once and lists it in `substitutions`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mprun.precision._torch import DispatchMode, tree_leaves
from mprun.precision._torch_switches import (
    BackendSwitches,
    backend_switches,
    on_backend_switch,
    set_backend_switches,
)
from mprun.precision.arithmetic import Arithmetic
from mprun.precision.formats import TF32, quantise
from mprun.precision.policy import Policy
from mprun.precision.products import (
    CLOSED,
    CONVOLUTION_BACKWARD,
    OPENED,
    all_products,
    is_float32,
    opened,
    unfused,
)


@contextmanager
def backend_flags(policy: Policy, native_tf32: bool = False) -> Iterator[None]:
    """Set the process-wide switches as `policy` needs them; restore them at the end.

    float32 arithmetic is IEEE unless `native_tf32`, for a TF32 policy on hardware that has it
    (emulation rounds around IEEE arithmetic); float32 partials switch the reduced-precision
    reductions of 16-bit matmuls off, float16 partials switch accumulation in float16 on.
    """
    with switches(native_tf32, policy.has_low_partials):
        yield


@contextmanager
def switches(tf32: bool = False, reduced: bool = False) -> Iterator[None]:
    """Set the switches; restore them at the end.

    Args:
        tf32: whether float32 matmuls and convolutions may be computed in TF32.
        reduced: whether 16-bit matmuls may accumulate in less than float32.
    """
    before = backend_switches()
    # Both interfaces at once: PyTorch raises an error where they disagree
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
        # At once, because the model's code may compute with its own setting right after
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


def round_to_tf32(x: Tensor) -> Tensor:
    """`x` (float32) rounded to a 10-bit mantissa, to nearest, ties to even; NaN stay NaN."""
    return quantise(x, TF32)


class EmulatedTf32(Arithmetic):
    """Rounds the inputs of matmuls and convolutions to TF32, on any device."""

    execution = "emulated"
    columns: Mapping[str, object] = {"tf32": True}

    @contextmanager
    def region(self) -> Iterator[None]:
        with unfused(), _Tf32Mode(self):
            yield

    def not_rounded(self, name: str) -> None:
        """Report an op that was computed in float32, once."""
        reason = "not rounded to TF32: its kernel keeps its products to itself"
        if self.substitute(name, "float32", reason):
            warnings.warn(f"{name} is {reason}; it is computed in float32", stacklevel=2)


class _Tf32Mode(DispatchMode):
    ROUNDED = all_products()

    def __init__(self, arithmetic: EmulatedTf32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arithmetic = arithmetic

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (positions := self.ROUNDED.get(func)) is not None:
            result = func(*_with_tf32(args, positions), **kwargs)
            return _with_bias_gradient(result, args) if func in CONVOLUTION_BACKWARD else result
        if (kernel := opened(func, args, OPENED)) is not None:
            with self:
                return kernel(*args, **kwargs)
        if func.overloadpacket.__name__ in CLOSED and any(map(is_float32, tree_leaves(args))):
            self._arithmetic.not_rounded(f"aten.{func.overloadpacket.__name__}")
        return func(*args, **kwargs)


def _with_tf32(args: Any, positions: tuple[int, ...]) -> list[Any]:
    """The arguments with the factors of the product rounded; sparse products have no TF32."""
    if any(isinstance(x, Tensor) and x.layout != torch.strided for x in args):
        return list(args)
    factors = {i for i in positions if i < len(args) and is_float32(args[i])}
    return [round_to_tf32(x) if i in factors else x for i, x in enumerate(args)]


def _with_bias_gradient(result: Any, args: Any) -> Any:
    """A convolution's gradients; that of the bias is a sum of unrounded output gradients."""
    gradient, mask = args[0], args[-1]
    if not mask[2]:
        return result
    return (*result[:2], gradient.sum([d for d in range(gradient.dim()) if d != 1]))
