"""Which dtypes a model trains in, and where these stop it from learning.

    print(mprun.audit(model, optimizer))         # after a backward pass, before optimizer.step()

A checkpoint that was loaded in bfloat16 trains without an error and hardly learns: a weight of 1
has neighbours at a distance of 2^-7 above and 2^-8 below, so an update of 6e-4 is rounded away, at
this step and at every later one. The audit looks for such parameters, for state that 16 bits cannot
hold, and for float32 matmuls in a lower precision. Of optimizers that round stochastically or have
Kahan's remainder or float32 masters nothing is reported.

Lost updates need gradients; they are computed exactly, in float64, and no step is taken.
"""

from __future__ import annotations

import os
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
from mprun.watch.updates import ExactUpdate, exact_updates, lost_updates

# Every kind of finding, and what it means
KINDS = {
    "lost_update": "a step leaves most of a module's weights, or of its biases, unchanged",
    "loaded_in_16_bits": "16-bit parameters whose optimizer loses small updates",
    "state_in_16_bits": "an optimizer keeps its moments in 16 bits and rounds them to nearest",
    "repeated_cast": "a forward pass casts the same weights to the same dtype again and again",
    "buffer_in_16_bits": "a step writes a buffer in 16 bits, where a slow average stands still",
    "sum_in_16_bits": "a cumsum in 16 bits whose differences are far from float64's",
    "tf32": "float32 matmuls are computed in TensorFloat-32 or bfloat16",
}

# Share of updates that may be lost; above it, most of a module stands still at each step
MAX_LOST = 0.5
KEEP = (
    "load or make the model in float32 (from_pretrained(..., dtype=torch.float32)) and use "
    "torch.autocast, or take mprun.optim.AdamW(..., rounding='stochastic')"
)
__all__ = ["KINDS", "Audit", "AuditFinding", "audit"]

Parameters = set[nn.Parameter]
Updates = dict[nn.Parameter, ExactUpdate]
# Of the counts of `lost_updates`
RULE = {torch.float16: "fp16.nearest", torch.bfloat16: "bf16.nearest"}
# Value of a CPU's switch for float32 matmuls -> the precision that it allows, in bits
CPU_BITS = {"tf32": 10, "bf16": 7}


@dataclass(frozen=True)
class Audit:
    """What an audit found; printed, it is a table."""

    findings: tuple[AuditFinding, ...]
    modules: tuple[DtypeRow, ...] = ()
    """Parameters, gradients, buffers and optimizer state by dtype and module, in few rows."""
    notes: tuple[str, ...] = ()
    """What could not be looked at, and what that needs."""

    @property
    def dtypes(self) -> dict[str, dict[str, int]]:
        """By role (parameters, gradients, buffers, optimizer state): dtype to how many numbers."""
        return totals(self.modules)

    def __str__(self) -> str:
        lines = [str(row) for row in self.modules]
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

        print(mprun.audit(model, optimizer))  # after loss.backward()

    Args:
        model: on any device.
        optimizer: the one that trains it; without it, parameters in 16 bits count as unsafe.
        casts: of one forward pass (`mprun.numerics.CastCounts`); without it, repeated casts, sums
            and buffers are not looked at.

    Returns:
        The findings: `lost_update` only where parameters have gradients.

    Raises:
        TypeError: an argument is something else.
    """
    steps = optimizer is None or hasattr(optimizer, "param_groups")  # or wraps one that has
    if not (isinstance(model, nn.Module) and steps and isinstance(casts, CastCounts | None)):
        given = ", ".join(type(x).__name__ for x in (model, optimizer, casts))
        legal = "a torch.nn.Module, its optimizer or None, mprun.numerics.CastCounts or None"
        raise TypeError(f"audit got arguments of type {given}; legal: {legal}")
    safe = _kept_safe(optimizer)
    trained = {p for p in model.parameters() if p.requires_grad}
    unsafe = {p for p in trained if p.dtype in LOW} - safe
    updates, notes = _updates(optimizer, unsafe)
    findings = (
        *_lost(model, updates),
        *_loaded(model, unsafe, trained),
        *_state(model, optimizer, safe, trained),
        *(() if casts is None else casts.findings(model)),
        *float32_findings(model),
    )
    return Audit(findings, dtype_rows(model, optimizer), notes)


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
    groups = [] if optimizer is None else optimizer.param_groups
    is_mastered = isinstance(optimizer, MasteredOptimizer)
    is_scaled = isinstance(optimizer, ScaledOptimizer)
    kept = (g for g in groups if is_mastered or (is_scaled and g.get("rounding") != "nearest"))
    return {p for group in kept for p in group["params"]}


def _loaded(model: nn.Module, unsafe: Parameters, trained: Parameters) -> Iterator[AuditFinding]:
    parts = dict(model.named_modules())
    for name in fewest_modules(model, unsafe, trained):
        held = [p for p in parts[name].parameters() if p in unsafe]
        kinds = " and ".join(sorted({dtype_name(p.dtype) for p in held}))
        count = sum(p.numel() for p in held)
        text = f"{count:,} trainable numbers in {kinds}, updated by rounding to nearest"
        yield AuditFinding("loaded_in_16_bits", name, text, KEEP)


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


def _lost(model: nn.Module, updates: Updates) -> Iterator[AuditFinding]:
    """Modules with a parameter of which a step would leave most numbers unchanged."""
    counts = {p: lost_updates(*update) for p, update in updates.items()}
    stay = {p: count.unchanged[RULE[p.dtype]] for p, count in counts.items()}
    lost = {p for p, count in counts.items() if stay[p] > MAX_LOST * count.updated}
    for name, module in model.named_modules():
        held = {key: p for key, p in module.named_parameters(recurse=False) if p in lost}
        if not held:
            continue
        updated = sum(counts[p].updated for p in held.values())
        share = sum(stay[p] for p in held.values()) / updated
        text = (
            f"this step leaves {share:.0%} of {updated:,} updated numbers of "
            f"{' and '.join(held)} unchanged"
        )
        yield AuditFinding("lost_update", name, text, KEEP)


def float32_findings(model: nn.Module) -> Iterator[AuditFinding]:
    """Float32 parameters on a device that multiplies them in a lower precision."""
    devices = {p.device for p in model.parameters() if p.dtype is torch.float32}
    # The variable overrules PyTorch's switch inside of cuBLAS and cuDNN
    if any(map(tf32_is_on, devices)) and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        yield _tf32("", 10, "torch.backends.cuda.matmul.fp32_precision")
    on_cpu = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    if any(d.type == "cpu" for d in devices) and on_cpu in CPU_BITS and hardware_has(on_cpu):
        yield _tf32(" on the CPU", CPU_BITS[on_cpu], "torch.backends.mkldnn.matmul.fp32_precision")


def _tf32(where: str, bits: int, switch: str) -> AuditFinding:
    text = f"float32 matmuls{where} have {bits} bits of precision instead of 23, by {switch}"
    return AuditFinding("tf32", "", text, f"{switch} = 'ieee', if it is not meant")


def hardware_has(mode: str) -> bool:
    """Whether this CPU multiplies float32 numbers in bf16 or tf32 where oneDNN may."""
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get({"bf16": "amx_bf16", "tf32": "amx_fp16"}[mode]):
        return True
    return mode == "bf16" and bool(capabilities.get("arm_bf16") or capabilities.get("bf16"))
