"""The process-wide switches of lower precision: their values, and who set them.

    float32    TensorFloat-32 on NVIDIA GPUs, bfloat16 or TF32 inside oneDNN on CPUs
    16 bits    matmuls and attention that accumulate in less than float32

A switch holds for the whole process. A line in a library, or a variable of the environment, changes
the results of code that knows nothing of it. Who set a switch is inferred: a value that is not
PyTorch's own default was set by an environment variable that explains it, or else by the program.

    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1   PyTorch starts with TF32 matmuls
    NVIDIA_TF32_OVERRIDE=0               NVIDIA's libraries use no TF32, whatever PyTorch asks for
    ONEDNN_DEFAULT_FPMATH_MODE=BF16      oneDNN's precision of float32 ops that PyTorch leaves open
                                         (DNNL_DEFAULT_FPMATH_MODE is its older name)
    CUBLAS_EMULATE_SINGLE_PRECISION=1    cuBLAS computes float32 matmuls from bfloat16 products

On a CPU the switches change results only where the hardware multiplies in the lower precision; so
findings ask for it (AMX, or bfloat16 instructions of an ARM CPU).
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mprun.precision.products import LOW
from mprun.precision.switches import tf32_is_on
from mprun.watch.audit_finding import AuditFinding

PYTORCH = "PyTorch's default"
PROGRAM = "the program"
# Device to the names in `torch.backends` whose `fp32_precision` concerns it
FP32_SWITCHES = {
    "cuda": ("cuda.matmul", "cudnn.conv", "cudnn.rnn"),
    "cpu": ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
}
# In `torch.backends.cuda.matmul`
REDUCTIONS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
TF32_BY_ENVIRONMENT = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
# oneDNN reads the first that is set
ONEDNN_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
# Device to the variables that libraries below PyTorch read
LIBRARY_VARIABLES = {
    "cuda": ("NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION"),
    "cpu": ONEDNN_MODES,
}
ATTENTION = "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp"
MATMULS = "torch.get_float32_matmul_precision()"
# PyTorch's own; `none` for the other switches
DEFAULTS = {
    "torch.backends.cudnn.conv.fp32_precision": "tf32",
    "torch.backends.cudnn.rnn.fp32_precision": "tf32",
    f"torch.backends.cuda.matmul.{REDUCTIONS[0]}": "True",
    f"torch.backends.cuda.matmul.{REDUCTIONS[1]}": "True",
    f"torch.backends.cuda.matmul.{REDUCTIONS[2]}": "False",
    ATTENTION: "False",
    MATMULS: "highest",
}


@dataclass(frozen=True)
class SwitchSetting:
    """One switch."""

    name: str  # As a program writes it, or the name of an environment variable
    value: str
    default: str
    set_by: str  # PyTorch's default, the environment variable of a name, or the program

    @property
    def lowers(self) -> bool:
        """Whether the value allows less than IEEE float32 arithmetic."""
        return self.value in ("tf32", "bf16", "True", "high", "medium")

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.set_by})"


def switch_settings(devices: set[str]) -> list[SwitchSetting]:
    """The switches that concern computations on these kinds of devices, cpu or cuda."""
    values: dict[str, str] = {}
    for device in sorted(devices & {*FP32_SWITCHES}):
        for name in FP32_SWITCHES[device]:
            values[f"torch.backends.{name}.fp32_precision"] = _precision(name)
    if (matmuls := _matmul_precision()) is not None:
        values[MATMULS] = matmuls
    if "cuda" in devices:
        for name in REDUCTIONS:
            value = getattr(torch.backends.cuda.matmul, name)
            values[f"torch.backends.cuda.matmul.{name}"] = str(value)
    values[ATTENTION] = str(_attention_is_reduced())
    rows = [_row(name, value) for name, value in values.items()]
    for device in sorted(devices & {*LIBRARY_VARIABLES}):
        for name in LIBRARY_VARIABLES[device]:
            if name in os.environ:
                rows.append(SwitchSetting(name, os.environ[name], "not set", "the environment"))
    return rows


def switch_findings(model: nn.Module, computed: set[torch.dtype]) -> Iterator[AuditFinding]:
    """The switches that lower this model's precision and are not PyTorch's default.

    Args:
        model: on its devices.
        computed: the 16-bit dtypes that it is known to compute in, besides those of its parameters.
    """
    yield from _float32(model)
    low = computed | {p.dtype for p in model.parameters() if p.dtype in LOW}
    on_cuda = any(p.device.type == "cuda" for p in model.parameters())
    if torch.float16 in low and on_cuda and torch.backends.cuda.matmul.allow_fp16_accumulation:
        name = "torch.backends.cuda.matmul.allow_fp16_accumulation"
        text = f"float16 matmuls accumulate in float16, which ends at 65504: {name} is on"
        yield _reduction("", text, name)
    attention = next((n for n, m in model.named_modules() if _is_attention(m)), None)
    if low and attention is not None and _attention_is_reduced():
        text = f"attention by plain matmuls accumulates in 16 bits: {ATTENTION} is on"
        yield _reduction(attention, text, f"{ATTENTION}(False)")


def _reduction(module: str, text: str, name: str) -> AuditFinding:
    fix = name if name.endswith(")") else f"{name} = False"
    return AuditFinding("reduced_precision_reduction", module, text, f"{fix}, if it is not meant")


def _float32(model: nn.Module) -> Iterator[AuditFinding]:
    """Float32 parameters on a device that multiplies them in a lower precision."""
    devices = {p.device for p in model.parameters() if p.dtype is torch.float32}
    if any(map(tf32_is_on, devices)) and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        text = "float32 matmuls have 10 bits of precision instead of 23"
        name = "torch.backends.cuda.matmul.fp32_precision"
        yield _tf32(text, _row(name, _precision("cuda.matmul")), f"{name} = 'ieee'")
    if not any(device.type == "cpu" for device in devices):
        return
    for what, op in (("matmuls", "matmul"), ("convolutions", "conv")):
        name = f"torch.backends.mkldnn.{op}.fp32_precision"
        setting = _onednn_setting(name, _precision(f"mkldnn.{op}"))
        bits = _onednn_bits(setting, op)
        if bits and (op == "matmul" or any(map(_is_convolution, model.modules()))):
            text = f"float32 {what} on the CPU have {bits} bits of precision instead of 23"
            yield _tf32(text, setting, f"{name} = 'ieee'")


def _tf32(text: str, setting: SwitchSetting, fix: str) -> AuditFinding:
    return AuditFinding(
        "tf32", "", f"{text}, by {setting.set_by}: {setting.name}", f"{fix}, if it is not meant"
    )


def _onednn_setting(name: str, value: str) -> SwitchSetting:
    """What decides about an op of oneDNN: PyTorch's switch, or else oneDNN's own variable."""
    variable = next((x for x in ONEDNN_MODES if x in os.environ), None)
    if value == "none" and variable is not None:
        return SwitchSetting(variable, os.environ[variable].lower(), "strict", "the environment")
    return _row(name, value)


def _onednn_bits(setting: SwitchSetting, op: str) -> int | None:
    """Bits of precision of a float32 op; None where they are float32's."""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    if setting.name in ONEDNN_MODES and op == "matmul" and not arm:
        return None  # PyTorch takes MKL's matmul where its own switch is off
    modes = {"bf16": ("bf16",), "tf32": ("tf32",), "any": ("bf16", "tf32")}
    for mode in modes.get(setting.value, ()):
        if hardware_has(mode):
            return {"bf16": 7, "tf32": 10}[mode]
    return None


def hardware_has(mode: str) -> bool:
    """Whether this CPU multiplies float32 numbers in bf16 or tf32 where oneDNN may."""
    read = getattr(torch.cpu, "get_capabilities", None)
    if read is None:  # an older PyTorch
        return False
    capabilities = read()
    if capabilities.get({"bf16": "amx_bf16", "tf32": "amx_fp16"}[mode]):
        return True
    return mode == "bf16" and bool(capabilities.get("arm_bf16") or capabilities.get("bf16"))


def _row(name: str, value: str) -> SwitchSetting:
    default = DEFAULTS.get(name, "none")
    who = PYTORCH if value == default else PROGRAM
    by_environment = {MATMULS: "high", "torch.backends.cuda.matmul.fp32_precision": "tf32"}
    if os.environ.get(TF32_BY_ENVIRONMENT) == "1" and by_environment.get(name) == value:
        who = f"the environment variable {TF32_BY_ENVIRONMENT}"
    return SwitchSetting(name, value, default, who)


def _precision(name: str) -> str:
    """`torch.backends.NAME.fp32_precision`; none: nothing was set, which is IEEE."""
    part: object = torch.backends
    for word in name.split("."):
        part = getattr(part, word)
    return str(getattr(part, "fp32_precision", "none"))


def _matmul_precision() -> str | None:
    """`torch.get_float32_matmul_precision()`; None where newer switches were set past it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _attention_is_reduced() -> bool:
    return bool(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
