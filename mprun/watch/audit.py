"""Which dtypes a model trains in, and where these stop it from learning.

    print(mprun.audit(model, optimizer))         # after a backward pass, before optimizer.step()

A checkpoint that was loaded in bfloat16 trains without an error and hardly learns: a weight of 1
has neighbours at a distance of 2^-7 above and 2^-8 below, so an update of 6e-4 is rounded away, at
this step and at every later one. The audit looks for such parameters, for state that 16 bits cannot
hold, and for switches of the process that change float32 arithmetic. Of optimizers that round
stochastically or have Kahan's remainder or float32 masters nothing is reported.

Lost updates need gradients; they are computed exactly, in float64, and no step is taken. Who set a
switch is inferred: a value that is not PyTorch's own default was set by an environment variable
that does so, or else by the program.
"""

from __future__ import annotations

import math
import os
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision._torch_switches import tf32_is_on
from mprun.precision.loss_scale import MasteredOptimizer, ScaledOptimizer
from mprun.precision.policy import dtype_name
from mprun.precision.products import LOW
from mprun.watch.cast_counts import (
    AuditFinding,
    CastCounts,
    DtypeRow,
    dtype_rows,
    fewest_modules,
    totals,
)
from mprun.watch.updates import ExactUpdate, exact_updates, lost_updates, lr_factors

# Every kind of finding, and what it means
KINDS = {
    "lost_update": "a step leaves most of a module's weights, or of its biases, unchanged",
    "loaded_in_16_bits": "16-bit parameters whose optimizer loses small updates",
    "norm_in_16_bits": "the weights of a normalization are among them",
    "embedding_in_16_bits": "the weights of an embedding are among them",
    "state_in_16_bits": "an optimizer keeps its moments in 16 bits and rounds them to nearest",
    "repeated_cast": "a forward pass casts the same weights to the same dtype again and again",
    "tf32": "float32 matmuls or convolutions are computed in TensorFloat-32 or bfloat16",
    "reduced_precision_reduction": "16-bit matmuls or attention accumulate in less than float32",
}

# Share of updates that may be lost; above it, most of a module stands still at each step
MAX_LOST = 0.5
KEEP = (
    "load or make the model in float32 and use torch.autocast, or take mprun.optim.AdamW(..., "
    "rounding='stochastic')"
)
LOAD = (
    "from_pretrained(..., dtype=torch.float32) and torch.autocast (bf16=True in the Trainer), or "
    "mprun.optim.AdamW(..., rounding='stochastic')"
)
__all__ = ["KINDS", "Audit", "AuditFinding", "audit"]

Parameters = set[nn.Parameter]
Updates = dict[nn.Parameter, ExactUpdate]
# Of the counts of `lost_updates`
RULE = {torch.float16: "fp16.nearest", torch.bfloat16: "bf16.nearest"}

PYTORCH = "PyTorch's default"
PROGRAM = "the program"
ATTENTION = "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp"
MATMULS = "torch.get_float32_matmul_precision()"
TF32 = "torch.backends.cuda.matmul.fp32_precision"
ACCUMULATION = "torch.backends.cuda.matmul.allow_fp16_accumulation"
# A switch, as a program writes it -> the device that it concerns (empty: each), PyTorch's own value
SWITCHES = {
    "torch.backends.mkldnn.matmul.fp32_precision": ("cpu", "none"),
    "torch.backends.mkldnn.conv.fp32_precision": ("cpu", "none"),
    "torch.backends.mkldnn.rnn.fp32_precision": ("cpu", "none"),
    TF32: ("cuda", "none"),
    "torch.backends.cudnn.conv.fp32_precision": ("cuda", "tf32"),
    "torch.backends.cudnn.rnn.fp32_precision": ("cuda", "tf32"),
    MATMULS: ("", "highest"),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": ("cuda", "True"),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": ("cuda", "True"),
    ACCUMULATION: ("cuda", "False"),
    ATTENTION: ("", "False"),
}
TF32_BY_ENVIRONMENT = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"  # 1: PyTorch starts with TF32 matmuls
# BF16, TF32, ANY: oneDNN's precision of float32 ops for which PyTorch's own switch is not set. The
# second is the older name; oneDNN reads the first that is set
ONEDNN_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
# Device to the variables that libraries below PyTorch read
LIBRARY_VARIABLES = {
    "cpu": ONEDNN_MODES,
    "cuda": (
        "NVIDIA_TF32_OVERRIDE",  # 0: NVIDIA's libraries use no TF32, whatever PyTorch asks for
        "CUBLAS_EMULATE_SINGLE_PRECISION",  # 1: float32 matmuls from bfloat16 products
    ),
}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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


@dataclass(frozen=True)
class Audit:
    """What an audit found; printed, it is a table."""

    findings: tuple[AuditFinding, ...]
    modules: tuple[DtypeRow, ...] = ()
    """Parameters, gradients, buffers and optimizer state by dtype and module, in few rows."""
    switches: tuple[SwitchSetting, ...] = ()
    """The process-wide switches of lower precision that concern the model's devices."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, and what that needs."""

    @property
    def dtypes(self) -> dict[str, dict[str, int]]:
        """By role (parameters, gradients, buffers, optimizer state): dtype to how many numbers."""
        return totals(self.modules)

    def __str__(self) -> str:
        lines = [str(row) for row in self.modules]
        lines += [f"switch: {x}" for x in self.switches if x.set_by != PYTORCH or x.lowers]
        for finding in self.findings:
            where = finding.module or "the model"
            lines += [f"{finding.kind}  {where}: {finding.text}", f"    fix: {finding.fix}"]
        if not self.findings:
            lines.append("nothing found")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def audit(
    model: nn.Module, optimizer: Optimizer | None = None, casts: CastCounts | None = None
) -> Audit:
    """Look at a model's dtypes; nothing is changed.

    Args:
        model: on any device.
        optimizer: the one that trains it; without it, parameters in 16 bits count as unsafe.
        casts: of one forward pass (`cast_counts`); without it, repeated casts are not looked for.

    Returns:
        The findings: `lost_update` only where parameters have gradients.
    """
    safe = _kept_safe(optimizer)
    trained = {p for p in model.parameters() if p.requires_grad}
    unsafe = {p for p in trained if p.dtype in LOW} - safe
    updates, notes = _updates(optimizer, unsafe)
    computed: set[torch.dtype] = set() if casts is None else casts.dtypes.intersection(LOW)
    findings = (
        *_lost(model, optimizer, updates),
        *_loaded(model, unsafe, trained),
        *_layers(model, unsafe),
        *_state(model, optimizer, safe, trained),
        *(() if casts is None else casts.findings(model)),
        *switch_findings(model, computed),
    )
    devices = {p.device.type for p in model.parameters()}
    switches = tuple(switch_settings(devices))
    return Audit(findings, dtype_rows(model, optimizer), switches, notes)


def _updates(optimizer: Optimizer | None, unsafe: Parameters) -> tuple[Updates, tuple[str, ...]]:
    """The exact updates of these parameters, and what they need where there are none."""
    if not unsafe:
        return {}, ()
    if optimizer is None:
        return {}, ("lost updates need the optimizer: mprun.audit(model, optimizer)",)
    if not any(p.grad is not None for p in unsafe):
        return {}, ("lost updates need gradients: call it after loss.backward()",)
    try:
        updates = exact_updates(optimizer)
    except TypeError:
        name = type(optimizer).__name__
        return {}, (f"lost updates are not known: a step of {name} needs a closure",)
    return {p: update for p, update in updates.items() if p in unsafe}, ()


def _kept_safe(optimizer: Optimizer | None) -> Parameters:
    """The parameters whose small updates the optimizer does not lose."""
    if optimizer is None:
        return set()
    is_mastered = isinstance(optimizer, MasteredOptimizer)
    safe = set()
    for group in optimizer.param_groups:
        rounds = isinstance(optimizer, ScaledOptimizer) and group.get("rounding") != "nearest"
        if is_mastered or rounds:
            safe.update(group["params"])
    return safe


def _loaded(model: nn.Module, unsafe: Parameters, trained: Parameters) -> Iterator[AuditFinding]:
    parts = dict(model.named_modules())
    for name in fewest_modules(model, unsafe, trained):
        held = [p for p in parts[name].parameters() if p in unsafe]
        kinds = " and ".join(sorted({dtype_name(p.dtype) for p in held}))
        count = sum(p.numel() for p in held)
        text = f"{count:,} trainable numbers in {kinds}, updated by rounding to nearest"
        fix = KEEP
        stored = _config_dtype(model)
        if stored in {dtype_name(p.dtype) for p in held}:
            text += (
                f"; config.dtype is {stored}, and from_pretrained loads what a checkpoint stores"
            )
            fix = LOAD
        yield AuditFinding("loaded_in_16_bits", name, text, fix)


def _config_dtype(model: nn.Module) -> str | None:
    """The dtype in the configuration of a Hugging Face model, or of one that is a part of it."""
    configs = (getattr(module, "config", None) for module in model.modules())
    for config in (x for x in configs if x is not None):
        # `torch_dtype` is its name before transformers 4.56
        dtype = getattr(config, "dtype", None) or getattr(config, "__dict__", {}).get("torch_dtype")
        if dtype is not None:
            return str(dtype).removeprefix("torch.")
    return None


def _layers(model: nn.Module, unsafe: Parameters) -> Iterator[AuditFinding]:
    for name, module in model.named_modules():
        held = [p for p in module.parameters(recurse=False) if p in unsafe]
        if not held:
            continue
        dtype = dtype_name(held[0].dtype)
        # By name: libraries have an RMSNorm of their own
        if "norm" in type(module).__name__.lower():
            kind = "norm_in_16_bits"
            text = f"its weights start at 1, of which {dtype} loses small updates"
        elif isinstance(module, nn.Embedding):
            kind = "embedding_in_16_bits"
            text = f"rare rows get few updates, and {dtype} loses the small ones"
        else:
            continue
        fix = f"keep it in float32: model.get_submodule({name!r}).float(), under torch.autocast"
        yield AuditFinding(kind, name, text, fix)


def _state(
    model: nn.Module, optimizer: Optimizer | None, safe: Parameters, trained: Parameters
) -> Iterator[AuditFinding]:
    """Moments in 16 bits of an optimizer that rounds them to nearest."""
    states = {} if optimizer is None else optimizer.state
    low = {
        p
        for p in {*model.parameters()} - safe
        if any(isinstance(x, Tensor) and x.dtype in LOW for x in states.get(p, {}).values())
    }
    for name in fewest_modules(model, low, trained):
        # Half of bfloat16's unit is 2^-8 of a number; an average over n steps moves by 1/n at each
        text = (
            "moments in 16 bits, rounded to nearest: a change below 0.4 % is lost in bfloat16, so "
            "averages over more than some 250 steps stand still"
        )
        yield AuditFinding("state_in_16_bits", name, text, KEEP)


def _lost(
    model: nn.Module, optimizer: Optimizer | None, updates: Updates
) -> Iterator[AuditFinding]:
    """Modules with a parameter of which a step would leave most numbers unchanged."""
    groups = [] if optimizer is None else optimizer.param_groups
    # A number for the text: modules of several groups are reported at the largest rate
    rate = max((float(group["lr"]) for group in groups if "lr" in group), default=math.nan)
    counts = {p: lost_updates(*update) for p, update in updates.items()}
    stay = {p: count.unchanged[RULE[p.dtype]] for p, count in counts.items()}
    lost = {p for p, count in counts.items() if stay[p] > MAX_LOST * count.updated}
    for name, module in model.named_modules():
        held = {key: p for key, p in module.named_parameters(recurse=False) if p in lost}
        if not held:
            continue
        factors = torch.cat([lr_factors(*updates[p], p.dtype) for p in held.values()])
        updated = sum(counts[p].updated for p in held.values())
        share = sum(stay[p] for p in held.values()) / updated
        text = (
            f"this step leaves {share:.0%} of {updated:,} updated numbers of "
            f"{' and '.join(held)} unchanged; half of them would move from a learning rate of "
            f"{rate * float(factors.median()):.1e} (now {rate:.1e})"
        )
        yield AuditFinding("lost_update", name, text, KEEP)


# ---- the switches of the process -----------------------------------------------------------------


def switch_settings(devices: set[str]) -> list[SwitchSetting]:
    """The switches that concern computations on these kinds of devices, cpu or cuda."""
    concerned = {"", *devices}
    rows = [_setting(name) for name, (device, _) in SWITCHES.items() if device in concerned]
    # newer switches that were set past it leave the older one without a value
    rows = [row for row in rows if row.value]
    return rows + [
        SwitchSetting(name, os.environ[name], "not set", "the environment")
        for device, names in LIBRARY_VARIABLES.items()
        for name in names
        if device in devices and name in os.environ
    ]


def switch_findings(model: nn.Module, computed: set[torch.dtype]) -> Iterator[AuditFinding]:
    """The switches that lower this model's precision and are not PyTorch's default.

    Args:
        model: on its devices.
        computed: the 16-bit dtypes that it is known to compute in, besides those of its parameters.
    """
    yield from _float32(model)
    low = computed | {p.dtype for p in model.parameters() if p.dtype in LOW}
    on_cuda = any(p.device.type == "cuda" for p in model.parameters())
    if torch.float16 in low and on_cuda and _value(ACCUMULATION) == "True":
        text = f"float16 matmuls accumulate in float16, which ends at 65504: {ACCUMULATION} is on"
        yield _reduction("", text, f"{ACCUMULATION} = False")
    # By name, as models have attention classes of their own
    kinds = ((name, type(module).__name__.lower()) for name, module in model.named_modules())
    attention = next((name for name, kind in kinds if "attention" in kind), None)
    if low and attention is not None and _value(ATTENTION) == "True":
        text = f"attention by plain matmuls accumulates in 16 bits: {ATTENTION} is on"
        yield _reduction(attention, text, f"{ATTENTION}(False)")


def _reduction(module: str, text: str, fix: str) -> AuditFinding:
    return AuditFinding("reduced_precision_reduction", module, text, f"{fix}, if it is not meant")


def _float32(model: nn.Module) -> Iterator[AuditFinding]:
    """Float32 parameters on a device that multiplies them in a lower precision."""
    devices = {p.device for p in model.parameters() if p.dtype is torch.float32}
    # The variable overrules PyTorch's switch inside of cuBLAS and cuDNN
    if any(map(tf32_is_on, devices)) and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        text = "float32 matmuls have 10 bits of precision instead of 23"
        yield _tf32(text, _setting(TF32), TF32)
    if not any(device.type == "cpu" for device in devices):
        return
    for what, op in (("matmuls", "matmul"), ("convolutions", "conv")):
        name = f"torch.backends.mkldnn.{op}.fp32_precision"
        setting = _onednn_setting(name)
        bits = _onednn_bits(setting, op)
        convolves = any(isinstance(m, CONVOLUTIONS) for m in model.modules())
        if bits and (op == "matmul" or convolves):
            text = f"float32 {what} on the CPU have {bits} bits of precision instead of 23"
            yield _tf32(text, setting, name)


def _tf32(text: str, setting: SwitchSetting, switch: str) -> AuditFinding:
    text = f"{text}, by {setting.set_by}: {setting.name}"
    return AuditFinding("tf32", "", text, f"{switch} = 'ieee', if it is not meant")


def _onednn_setting(name: str) -> SwitchSetting:
    """What decides about an op of oneDNN: PyTorch's switch, or else oneDNN's own variable."""
    variable = next((x for x in ONEDNN_MODES if x in os.environ), None)
    if _value(name) == "none" and variable is not None:
        return SwitchSetting(variable, os.environ[variable].lower(), "strict", "the environment")
    return _setting(name)


def _onednn_bits(setting: SwitchSetting, op: str) -> int | None:
    """Bits of precision of a float32 op; None where they are float32's."""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    if setting.name in ONEDNN_MODES and op == "matmul" and not arm:
        return None  # PyTorch takes MKL's matmul where its own switch is off
    # Hardware that does not multiply in the lower precision computes in float32
    modes = {"bf16": ("bf16",), "tf32": ("tf32",), "any": ("bf16", "tf32")}
    for mode in modes.get(setting.value, ()):
        if hardware_has(mode):
            return {"bf16": 7, "tf32": 10}[mode]  # stored bits of the mantissa
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


def _setting(name: str) -> SwitchSetting:
    value, default = _value(name), SWITCHES[name][1]
    who = PYTORCH if value == default else PROGRAM
    by_environment = {MATMULS: "high", TF32: "tf32"}
    if os.environ.get(TF32_BY_ENVIRONMENT) == "1" and by_environment.get(name) == value:
        who = f"the environment variable {TF32_BY_ENVIRONMENT}"
    return SwitchSetting(name, value, default, who)


def _value(name: str) -> str:
    """The value of a switch; `none`: nothing was set, which is IEEE. Empty where it has none."""
    if name == ATTENTION:
        return str(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())
    if name == MATMULS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.get_float32_matmul_precision()
        except RuntimeError:
            return ""
    part: object = torch
    for word in name.split(".")[1:]:
        part = getattr(part, word, "none")
    return str(part)
