"""How float32 arithmetic is done: the switches of `torch.backends`.

PyTorch has process-wide switches that change what a "float32" matmul or convolution computes:
TensorFloat-32 on NVIDIA GPUs (by default off for matmuls, *on* for convolutions), bfloat16 inside
oneDNN on CPUs, reduced-precision accumulation in 16-bit matmuls. A run sets all of them from its
policy and restores them however it ends.

They have two interfaces, `fp32_precision` and the older `allow_tf32`. PyTorch raises an error if
the two disagree. Both are set, so that a model's code can use either. If such code sets a switch,
it is reset at once, with a warning: a run computes in its mode, as its record states.

The public interfaces do not do: that of oneDNN's level sets another one (PyTorch 2.14), and no hook
is called when code sets a switch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mprun.precision.policy import Policy

# Names in `torch.backends` -> backend and op of the setters
_FP32_SWITCHES = {
    "cuda.matmul": ("cuda", "matmul"),
    "cudnn.conv": ("cuda", "conv"),
    "cudnn.rnn": ("cuda", "rnn"),
    "mkldnn.matmul": ("mkldnn", "matmul"),
    "mkldnn.conv": ("mkldnn", "conv"),
    "mkldnn.rnn": ("mkldnn", "rnn"),
}
# The settings of ops that have none of their own
_FP32_LEVELS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_REDUCTION_SWITCHES = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
# The functions of `torch._C` that `torch.backends` calls to set a switch
_SETTERS = {
    name: getattr(torch._C, name)
    for name in (
        "_set_fp32_precision_setter",
        "_set_float32_matmul_precision",
        "_set_cublas_allow_tf32",
        "_set_cudnn_allow_tf32",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_accumulation",
    )
}


@dataclass(frozen=True)
class BackendSwitches:
    """The switches of `torch.backends` that decide how matmuls and convolutions compute."""

    levels: tuple[str, ...]  # Of `_FP32_LEVELS`
    fp32: dict[str, str]
    """By name in `torch.backends`: ieee, tf32, bf16 or none (the setting of the level above)."""
    reductions: dict[str, Any]
    """Of `torch.backends.cuda.matmul`: may 16-bit matmuls accumulate in less than float32?"""
    matmul: str  # The older interface: `torch.get_float32_matmul_precision()`
    cudnn: bool  # The older interface: `torch.backends.cudnn.allow_tf32`

    @classmethod
    def all_at(cls, fp32: str, reduced: bool) -> BackendSwitches:
        """Every float32 op at one precision, ieee or tf32."""
        return cls(
            ("none",) * len(_FP32_LEVELS),
            dict.fromkeys(_FP32_SWITCHES, fp32),
            dict.fromkeys(_REDUCTION_SWITCHES, reduced),
            # PyTorch's names of TF32 and of IEEE float32
            "high" if fp32 == "tf32" else "highest",
            fp32 == "tf32",
        )

    def changes(self, wanted: BackendSwitches) -> list[str]:
        """What differs from the wanted ones, as `cuda.matmul.fp32_precision to 'tf32'`.

        A `none` is left out: it asks for nothing.
        """
        fp32 = [
            f"torch.backends.{name}.fp32_precision to {value!r}"
            for name, value in self.fp32.items()
            if value not in (wanted.fp32[name], "none")
        ]
        return fp32 + [
            f"torch.backends.cuda.matmul.{name} to {value}"
            for name, value in self.reductions.items()
            if value != wanted.reductions[name]
        ]


def backend_switches() -> BackendSwitches:
    """The current switches.

    An op without a setting of its own reads as its level, so levels are read first and taken away.
    The older interface raises an error where it disagrees with the newer one; it is read with the
    newer one at ieee, where only an older one that allows TF32 can disagree.
    """
    get, put = torch._C._get_fp32_precision_getter, _SETTERS["_set_fp32_precision_setter"]
    levels = []
    for key in _FP32_LEVELS:
        # Taken away: an op without a setting would read as its level, and get a setting of its own
        levels.append(get(*key))
        put(*key, "none")
    fp32 = {name: get(*key) for name, key in _FP32_SWITCHES.items()}
    matmul = torch.backends.cuda.matmul
    reductions = {name: getattr(matmul, name) for name in _REDUCTION_SWITCHES}
    try:
        for key in _FP32_SWITCHES.values():
            put(*key, "ieee")
        precision = torch._C._get_float32_matmul_precision()
        try:
            # See above: it raises an error where it disagrees
            cudnn = torch._C._get_cudnn_allow_tf32()
        except RuntimeError:
            cudnn = True
    finally:
        for key, value in zip(_FP32_LEVELS, levels, strict=True):
            put(*key, value)
        for name, value in fp32.items():
            put(*_FP32_SWITCHES[name], value)
    return BackendSwitches(tuple(levels), fp32, reductions, precision, cudnn)


def set_backend_switches(switches: BackendSwitches) -> None:
    """Set the switches: the older interface first, which sets the newer one too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older interface is deprecated
        _SETTERS["_set_float32_matmul_precision"](switches.matmul)
        _SETTERS["_set_cudnn_allow_tf32"](switches.cudnn)
    for key, level in zip(_FP32_LEVELS, switches.levels, strict=True):
        _SETTERS["_set_fp32_precision_setter"](*key, level)
    for name, value in switches.fp32.items():
        _SETTERS["_set_fp32_precision_setter"](*_FP32_SWITCHES[name], value)
    for name, value in switches.reductions.items():
        setter = _SETTERS[f"_set_cublas_{name}"]
        # A pair where split-K is set as well: whether less than float32 is allowed, and split-K
        setter(*value) if isinstance(value, tuple) else setter(value)


@contextmanager
def on_backend_switch(call: Callable[[], None]) -> Iterator[None]:
    """Inside, `call` runs after code has set a switch through `torch.backends` or `torch`.

    An attribute of `torch.backends.cudnn` itself (`allow_tf32 = ...`) is set past it.
    """

    def followed(setter: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(setter)
        def set_and_call(*args: Any) -> None:
            setter(*args)
            call()

        return set_and_call

    before = {name: getattr(torch._C, name) for name in _SETTERS}
    try:
        for name, setter in _SETTERS.items():
            setattr(torch._C, name, followed(setter))
        yield
    finally:
        for name, setter in before.items():
            setattr(torch._C, name, setter)


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
    """Set whether float32 may be TF32, and 16-bit sums `reduced`; restore all at the end."""
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
