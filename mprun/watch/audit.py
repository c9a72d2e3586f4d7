"""Which dtypes a model trains in, and where they keep it from learning.

    print(mprun.audit(model, optimizer))         # after a backward pass, before optimizer.step()

A checkpoint that was loaded in bfloat16, or a `model.to(torch.bfloat16)`, trains without an error
and hardly learns: a weight of 1 has neighbours at a distance of 2^-7 above and 2^-8 below, so an
update of 6e-4 is rounded away, at this step and at every later one. The audit looks for such
parameters, for state that 16 bits cannot hold, and for switches that change float32 arithmetic.

Parameters in 16 bits are safe with an optimizer of `mprun.optim` that rounds stochastically or
keeps Kahan's remainder, or with float32 masters (`mprun.optim.MasterWeights`): about these, nothing
is reported. Lost updates need gradients; they are computed exactly, in float64, and no step is
taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision.policy import dtype_name
from mprun.precision.products import LOW
from mprun.precision.update import MasteredOptimizer, ScaledOptimizer
from mprun.watch.audit_finding import KINDS, AuditFinding, fewest_modules
from mprun.watch.cast_counts import CastCounts, DtypeRow, dtype_rows, totals
from mprun.watch.switch_settings import PYTORCH, SwitchSetting, switch_findings, switch_settings
from mprun.watch.updates import ExactUpdate, exact_updates, lost_updates, lr_factors

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
