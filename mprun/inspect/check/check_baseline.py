"""`mprun-baseline.json`: what a recipe computed when it was last reviewed, and what changed since.

One file holds on every machine, because its figures are of two kinds. Those of `reference` are
computed in float64, where machines agree to ten digits; a weight may differ by a float32 rounding
between machines (the normal distribution is drawn with other instructions), so each figure has a
bound for such roundings, measured when the file was written. Losses of a mode are compared bit by
bit where machine and versions are the same, else by their bounds.

The spread of a figure is measured by `DRAWS` passes from weights that are moved at random by up to
half a unit of float32 (for the losses of a mode: weights and inputs, of its dtype).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from mprun.errors import definition
from mprun.inspect.check.check_result import Finding
from mprun.inspect.check.checked_mode import LOSS, CheckedMode
from mprun.inspect.divergence.boundaries import calls_followed, floating
from mprun.inspect.passes import in_float64
from mprun.inspect.rounding_oracle import half_step, spread_bound
from mprun.inspect.trace import traced_step
from mprun.precision.policy import torch_dtype
from mprun.records.reader import read_json
from mprun.train.machine import machine
from mprun.watch.updates import weights_moved

SCHEMA_VERSION = 1
DIGITS = 7  # Significant digits that are written: those of float32
OUTPUT, LOSSES = "norm of the output of {} in float64", "loss of {}"
# Peak over the baseline's from which memory has grown: other kernels ask for other scratch
GREW = 1.02


class BaselineFigure(NamedTuple):
    """A number, and by how much another machine may differ."""

    value: float
    explained: float  # The bound; the name is that of the file

    def agrees(self, other: BaselineFigure, exact: bool) -> bool:
        """Whether another number is the same, to its last digit (`exact`) or within the bounds."""
        if exact:
            return rounded(self.value) == rounded(other.value)
        # both have errors, which are independent; and a file's last digit is off by up to a unit
        bound = math.hypot(self.explained, other.explained)
        return abs(other.value - self.value) <= bound + 10.0 ** (1 - DIGITS) * abs(self.value)


@dataclass(frozen=True)
class BaselineStep:
    """The first step in float64, on the first batch."""

    loss: BaselineFigure
    outputs: dict[str, BaselineFigure] = field(default_factory=dict)
    """Module to the norm of its outputs, in the order they ran."""
    gradients: dict[str, BaselineFigure] = field(default_factory=dict)
    """Parameter to the norm of its gradient."""


@dataclass(frozen=True)
class ModeBaseline:
    """A mode."""

    losses: list[BaselineFigure]  # Of the first steps
    ops: dict[str, int] = field(default_factory=dict)
    """`linear bfloat16` to how many of them a forward pass has."""
    peak_bytes: dict[str, int] = field(default_factory=dict)  # The peak of a step by category


@dataclass(frozen=True)
class Baseline:
    """The content of mprun-baseline.json."""

    schema_version: int
    recipe: str
    machine: str  # Hardware, instructions and threads: where they are the same, bits are
    versions: dict[str, str | None]
    code: dict[str, str] = field(default_factory=dict)
    """Class of a module to twelve hex digits of its source."""
    reference: BaselineStep | None = None  # None in the file of an observed loop (0.2.0)
    modes: dict[str, ModeBaseline] = field(default_factory=dict)

    def figures(self, mode: str, steps: int) -> dict[str, dict[str, BaselineFigure]]:
        """What a mode is compared by, in this order; of its losses, the first `steps`."""
        losses = {f"step {n}": x for n, x in enumerate(self.modes[mode].losses[:steps], 1)}
        if self.reference is None:
            return {LOSSES: losses}
        return {
            OUTPUT: self.reference.outputs,
            "norm of the gradient of {} in float64": self.reference.gradients,
            "loss of {} in float64": {"the first step": self.reference.loss},
            LOSSES: losses,
        }

    @property
    def text(self) -> str:
        """The file: sorted, a figure per line, with digits that do not change without a reason."""
        content = json.loads(msgspec.json.encode(self), parse_float=rounded)
        text = json.dumps(content, indent=1, sort_keys=True)
        # value and bound of a figure on one line: a diff in review shows a line for each figure
        return re.sub(r"\[\s+([-\d.e+]+),\s+([-\d.e+]+)\s+\]", r"[\1, \2]", text) + "\n"


def rounded(number: float | str) -> float:
    """A number with the digits that are written."""
    return float(f"{float(number):.{DIGITS}g}")


def read_baseline(path: Path) -> Baseline | None:
    """The baseline; None where there is none.

    Raises:
        UsageError: it cannot be read, or is damaged.
    """
    try:
        return read_json(path, Baseline, SCHEMA_VERSION)
    except FileNotFoundError:
        return None


def updated(old: Baseline | None, new: Baseline) -> Baseline:
    """The new baseline, with the modes of the old one that were not checked now."""
    if old is None or old.recipe != new.recipe:
        return new
    return replace(new, modes={**old.modes, **new.modes})


def circumstances(old: Baseline, new: Baseline) -> Iterator[str]:
    """What is not the same as when the baseline was written."""
    yield from _different(old.versions, new.versions, None)
    yield from _different({"machine": old.machine}, {"machine": new.machine}, None)
    if code := [x.split()[0] for x in _different(old.code, new.code, None)]:
        yield f"code of {', '.join(code)}"


def _different(old: Mapping[str, object], new: Mapping[str, object], missing: object) -> list[str]:
    """`name old -> new` of each value that is not the same."""
    pairs = [(x, old.get(x, missing), new.get(x, missing)) for x in sorted({*old, *new})]
    return [f"{name} {was} -> {now}" for name, was, now in pairs if was != now]


def changes(old: Baseline, new: Baseline, mode: str) -> Iterator[Finding]:
    """The findings about a mode: what differs by more than its bound, the first of each kind."""
    if old.recipe != new.recipe or mode not in old.modes:
        yield Finding("no_baseline", "", f"it has {old.recipe} in {', '.join(old.modes)}")
        return
    since = "; ".join(circumstances(old, new))
    since = f" (changed since: {since})" if since else ""
    was, now = old.modes[mode], new.modes[mode]
    if (changed := next(_changed_figures(old, new, mode, bits=not since), None)) is not None:
        module, text = changed
        yield Finding("changed", module, text + since)
    if ops := _different(was.ops, now.ops, 0):
        yield Finding("casts_changed", "", ", ".join(ops[:4]) + since)
    before, after = was.peak_bytes.get("peak", 0), now.peak_bytes.get("peak", 0)
    if before and after > GREW * before:
        grown = {k: x - was.peak_bytes.get(k, 0) for k, x in now.peak_bytes.items() if k != "peak"}
        most = max(grown, key=lambda k: grown[k])
        text = f"{before / 2**20:.1f} -> {after / 2**20:.1f} MiB, most of it {most}"
        yield Finding("memory_grew", "", text + since, at=after / before)


def _changed_figures(
    old: Baseline, new: Baseline, mode: str, bits: bool
) -> Iterator[tuple[str, str]]:
    """The module of each figure that is new, gone, or differs by more than its bound; a text.

    `bits`: losses of the mode must be the same in each digit.
    """
    steps = min(len(x.modes[mode].losses) for x in (old, new))
    before = old.figures(mode, steps)
    for what, now in new.figures(mode, steps).items():
        was, exact = before.get(what, now), bits and what == LOSSES
        for name in {**now, **was}:
            module = name if what == OUTPUT else name.rpartition(".")[0]
            text = what.format(name or "the model")
            if name not in was or name not in now:
                yield module, f"{text} is {'gone' if name in was else 'new'}"
                continue
            x, y = was[name], now[name]
            if not x.agrees(y, exact):
                text += ", on the same machine and versions," if exact else ""
                text += f" {x.value:.7g} -> {y.value:.7g}; the bound is {x.explained:.1e}"
                yield module, text


# ---- what is measured ----------------------------------------------------------------------------

DRAWS = 4  # Each one is a pass in float64; fewer degrees of freedom make Student's bound far wider
STEPS = 4  # Steps of a mode whose losses are written


def reference_of(mode: CheckedMode) -> Baseline:
    """What is the same for all modes; `modes` is empty."""
    hardware = machine.hardware(mode.plan.device, []).name
    return Baseline(
        schema_version=SCHEMA_VERSION,
        recipe=mode.plan.config.recipe.name,
        machine=f"{hardware}, {torch.get_num_threads()} threads",
        versions=mode.planned.summary.versions,
        code=dict(sorted(_code(mode.float32_model))),
        reference=_reference(mode),
        modes={},
    )


def figures_of(mode: CheckedMode) -> ModeBaseline:
    """The figures of a mode."""
    unit = half_step(torch_dtype(mode.plan.policy.compute_dtype))
    curves = [mode.losses(STEPS, number, most=unit) for number in range(DRAWS + 1)]
    losses = curves[0]
    bounds = [spread_bound(moved, loss) for loss, *moved in zip(*curves, strict=False)]
    grown = accumulate(bounds, max)  # a difference of one step is in all later ones
    return ModeBaseline(
        losses=[BaselineFigure(*x) for x in zip(losses, grown, strict=False)],
        ops=dict(sorted(_ops(mode).items())),
        peak_bytes=mode.memory.totals,
    )


def _code(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The classes of the user's modules, each with a digest of its source."""
    for kind in {type(module) for module in model.modules()}:
        if definition(kind.forward) is None:  # a class of PyTorch, whose version is in the file
            continue
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):  # it was made without a file
            continue
        # 48 bits tell versions of one class apart, and keep a line of the file short
        yield kind.__qualname__, hashlib.sha256(source.encode()).hexdigest()[:12]


def _reference(mode: CheckedMode) -> BaselineStep:
    own, *moved = (_float64_pass(mode, seed) for seed in range(DRAWS + 1))
    figures: dict[str, dict[str, BaselineFigure]] = {"output": {}, "gradient": {}, "loss": {}}
    for (what, name), value in own.items():
        draws = [x.get((what, name), value) for x in moved]
        figures[what][name] = BaselineFigure(value, spread_bound(draws, value))
    return BaselineStep(figures["loss"][""], figures["output"], figures["gradient"])


def _float64_pass(mode: CheckedMode, seed: int) -> dict[tuple[str, str], float]:
    """The figures of the first step in float64; seed 0 leaves the weights as they are."""
    most = half_step(torch.float32) if seed else 0.0
    figures: dict[tuple[str, str], float] = {}

    def end(path: str, output: Any) -> None:
        norms = [float(x.detach().double().norm()) for x in floating(output)]
        # a module may be called several times: the norm of all its outputs
        figures["output", path] = math.hypot(figures.get(("output", path), 0.0), *norms)

    step = mode.float32_step(
        mode.exact_batches[0],
        lambda model: weights_moved([*model.parameters()], most, seed),
        in_float64,
        lambda model: calls_followed(model.named_modules(), lambda *_: None, end),
    )
    figures |= {("gradient", name): float(x.norm()) for name, x in step.items() if name != LOSS}
    return figures | {("loss", ""): float(step[LOSS])}


def _ops(mode: CheckedMode) -> Counter[str]:
    """The calls of a forward pass that cast or compute, by the dtype that they return."""
    rows = traced_step(mode.plan, mode.batches[0])
    return Counter(
        f"{x.op} {x.dtypes_out[0]}"
        for x in rows
        if x.phase == "forward" and x.kernels and x.dtypes_out
    )
