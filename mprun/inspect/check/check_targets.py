"""What a mode would do on other hardware, by the table of what that lacks: check_targets.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.config.validate import loss_scale_kind
from mprun.inspect.check.check_result import ERROR, Finding, ModeChecks, data_file
from mprun.inspect.check.checked_mode import CheckedMode
from mprun.precision._torch import in_backward, op_name, storage_key
from mprun.precision.layers import layer_precision
from mprun.precision.nested import all_tensors
from mprun.precision.policy import dtype_name
from mprun.records.console.formatting import UNITS, by_reason, size_text
from mprun.records.layer_values import product_formats
from mprun.watch.op_watcher import OpWatcher, RunOp, current_line, tensors_of

EMULATED, ABSENT = "emulated", "absent"
HOW = {
    "in float32": "each result is computed in float32 and rounded",
    EMULATED: "mprun emulates it in float32, which is no faster",
}
REFUSED = "target_refuses", "it is refused"  # Kind of finding, and its words
AS_ASKED = "as asked"


@dataclass(frozen=True)
class Lack:
    """A format that a target has no units for."""

    how: str
    why: str
    source: str


@dataclass(frozen=True)
class Target:
    """Other hardware."""

    lacks: dict[str, Lack]
    source: str
    memory_gib: list[float] = field(default_factory=list)
    """Of each model that is sold, the smallest first; empty where it is the machine's."""
    note: str = ""


@dataclass(frozen=True)
class TargetTable:
    """The content of check_targets.yaml."""

    sources: dict[str, str]  # By their short names
    targets: dict[str, Target]  # By the names of `check.targets`


TABLE = data_file("check_targets.yaml", TargetTable)
TARGETS = TABLE.targets


class FormatUse(NamedTuple):
    """Where a configuration uses a format."""

    module: str = ""
    line: str = ""
    text: str = ""  # What uses it, if that is not the format itself


@dataclass(frozen=True)
class Configuration:
    """What a mode asks of the hardware."""

    uses: Mapping[str, FormatUse] = field(default_factory=dict)
    """Formats, each where it is used first: dtypes, tf32, fp8, mxfp8, nvfp4, float16 partials."""
    native: bool = False
    """Whether it has `execution=native`, which is never replaced by an emulation."""
    scaled: bool = True  # Whether the loss is scaled
    peak_bytes: int = 0  # Of a step


def refused_or_different(name: str, wanted: Configuration) -> Iterator[Finding]:
    """What a configuration would not do on a target as it is asked for; nothing where it would."""
    target = TARGETS[name]
    for format_name, use in wanted.uses.items():
        if (lack := target.lacks.get(format_name)) is None:
            continue
        refused = lack.how == ABSENT or (lack.how == EMULATED and wanted.native)
        kind, how = REFUSED if refused else ("target_differs", HOW[lack.how])
        text = f"{use.text or format_name}: {lack.why}; {how}"
        yield Finding(kind, use.module, text, line=use.line)
    # 6e-08 is the smallest subnormal number of float16
    if "float16" in wanted.uses.keys() - target.lacks.keys() and not wanted.scaled:
        text = "float16 without a loss scale: gradients below 6e-08 become 0; leave out "
        text += "loss_scale=none"
        yield Finding("target_differs", wanted.uses["float16"].module, text)
    step = f"a step takes {size_text(wanted.peak_bytes)}, and"
    sold = target.memory_gib
    large = [x for x in sold if wanted.peak_bytes <= x * UNITS["GiB"]]
    if sold and not large:
        yield Finding("target_refuses", "", f"{step} it has {sold[-1]:g}")
    elif large != sold:
        yield Finding("target_differs", "", f"{step} only models with {large[0]:g} GiB have it")


def target_verdict(findings: Iterable[Finding]) -> str:
    """What the record has for a mode on a target: refused, differs, or as asked."""
    severities = {x.severity for x in findings}
    return "refused" if ERROR in severities else "differs" if severities else AS_ASKED


def target_lines(targets: Sequence[str], modes: Sequence[ModeChecks]) -> Iterator[str]:
    """A line for each target: what each mode would do there."""
    for name in dict.fromkeys(targets):
        figures = {x.label: str(x.figures.get(f"target {name}", "not checked")) for x in modes}
        labels = by_reason(figures)
        text = "; ".join(f"{how}: {', '.join(x)}" for how, x in labels.items())
        note = f" ({TARGETS[name].note})" if TARGETS[name].note else ""
        yield f"{name}: {f'runs {AS_ASKED}' if [*labels] == [AS_ASKED] else text}{note}"


# ---- a mode --------------------------------------------------------------------------------------

# Formats of products by the names of the table of targets; the others are fp8
FORMATS = {"mxfp8": "mxfp8", "nvfp4": "nvfp4", "fp16": "float16", "bf16": "bfloat16", "fp32": ""}


def on_targets(mode: CheckedMode) -> Iterator[Finding]:
    """The findings for `check.targets`, each once, with the targets that it holds for.

    A figure of each target says what the mode does there.
    """
    wanted, alike = _configuration(mode), dict[Finding, list[str]]()
    for name in dict.fromkeys(mode.settings.targets):
        found = [*refused_or_different(name, wanted)]
        mode.checks.figures[f"target {name}"] = target_verdict(found)
        for x in found:
            alike.setdefault(x, []).append(name)
    for x, targets in alike.items():
        yield replace(x, text=f"on {', '.join(targets)}: {x.text}")


def _configuration(mode: CheckedMode) -> Configuration:
    plan = mode.plan
    uses: dict[str, FormatUse] = {}
    for name, use in _formats(mode):
        uses.setdefault(name, use)  # the first place of a format is reported
    is_refused = any("float64" in TARGETS[name].lacks for name in mode.settings.targets)
    if is_refused and (where := mode.once("float64", lambda: _float64(mode))):
        uses["float64"] = where
    scaled = loss_scale_kind(plan.config, plan.layers.values()) != "none"
    native = plan.config.execution == "native"
    return Configuration(uses, native, scaled, mode.memory.peak_bytes)


def _formats(mode: CheckedMode) -> Iterator[tuple[str, FormatUse]]:
    """Formats that products and ops are computed in; none where mprun emulates everywhere."""
    plan, policy = mode.plan, mode.plan.policy
    if plan.config.execution == "emulated" or policy.rounding_scope == "all":
        return
    if policy.is_low:
        yield policy.compute_dtype, FormatUse()
    if policy.tf32:
        yield "tf32", FormatUse()
    if policy.has_low_partials:
        yield "float16 partials", FormatUse()
    if policy.gemms not in ("none", "layers"):
        yield FORMATS.get(policy.gemms, "fp8"), FormatUse(text=policy.gemms)
    for name, value in plan.layers.items():
        if layer := layer_precision(value, policy.casting):
            yield dtype_name(layer.compute), FormatUse(name)
        for x in (product_formats(value) or {}).values():
            yield FORMATS.get(x, "fp8"), FormatUse(name, text=x)


class _Float64Ops(OpWatcher):
    """Finds the first op of forward pass and loss that gives float64 of `tensors`' device."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.first: FormatUse | None = None
        self._on_device = {storage_key(x): x for x in tensors}

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        result = run()
        inputs = () if in_backward() else tensors_of((args, kwargs))
        if any(storage_key(x) in self._on_device for x in inputs):
            made = list(tensors_of(result))
            # references stay: a freed storage's key would be given to another tensor
            self._on_device |= {storage_key(x): x for x in made}
            if self.first is None and any(x.dtype == torch.float64 for x in made):
                _, module = self.tracker.context()
                line = str(current_line() or "")
                self.first = FormatUse(module or "", line, f"float64 of {op_name(func)}")
        return result


def _float64(mode: CheckedMode) -> FormatUse | None:
    """Where the first step makes numbers of float64."""
    batch = mode.exact_batches[0]
    given = [x for part in batch.parts for x in all_tensors((part.content, part.inputs))]
    if any(x.dtype == torch.float64 for x in given):
        return FormatUse(text="float64 in the batch")
    model = mode.float32_probe.model
    watcher = _Float64Ops([*model.parameters(), *model.buffers(), *given])
    mode.float32_step(batch, watcher.following, lambda _: watcher)
    return watcher.first
