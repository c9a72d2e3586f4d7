"""`mprun-baseline.json`: what a recipe computed when it was last reviewed, and what changed since.

One file holds on every machine, because its figures are of two kinds. Those of `reference` are
computed in float64, where machines agree to ten digits; a weight may differ by a float32 rounding
between machines (the normal distribution is drawn with other instructions), so each figure has the
part of it that such roundings explain, measured when the file was written. Losses of a mode are
compared bit by bit where machine and versions are the same, else by what was explained there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from mprun.errors import UsageError
from mprun.records.reader import read_json
from mprun.results.check_result import Finding

SCHEMA_VERSION = 1
DIGITS = 7
"""Significant digits that are written: those of float32."""
GREW = 1.02
"""Peak over the baseline's from which memory has grown: other kernels ask for other scratch."""


class BaselineFigure(NamedTuple):
    """A number, and by how much another machine may differ."""

    value: float
    explained: float

    def is_near(self, other: float) -> bool:
        """Whether another machine's number is explained, with the digits that are written."""
        return abs(other - self.value) <= self.explained + 10.0 ** (1 - DIGITS) * abs(self.value)


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

    losses: list[BaselineFigure]
    """Of the first steps."""
    ops: dict[str, int] = field(default_factory=dict)
    """`linear bfloat16` to how many of them a forward pass has."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """The peak of a step by category."""


@dataclass(frozen=True)
class Baseline:
    """The content of mprun-baseline.json."""

    schema_version: int
    recipe: str
    machine: str
    """Hardware, instructions and threads: where they are the same, bits are."""
    versions: dict[str, str | None]
    code: dict[str, str]
    """Class of a module to twelve hex digits of its source."""
    reference: BaselineStep | None
    """None for an observed loop, whose model is not run again."""
    modes: dict[str, ModeBaseline]

    @property
    def text(self) -> str:
        """The file: sorted, a figure per line, with digits that do not change without a reason."""
        rounded = _rounded(msgspec.to_builtins(self))
        text = json.dumps(rounded, indent=1, sort_keys=True)
        return re.sub(r"\[\s+([-\d.e+]+),\s+([-\d.e+]+)\s+\]", r"[\1, \2]", text) + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _rounded(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(x) for x in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def read_baseline(path: Path) -> Baseline | None:
    """The baseline; None where there is none.

    Raises:
        UsageError: it cannot be read, or is damaged.
    """
    try:
        return read_json(path, Baseline, SCHEMA_VERSION)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def updated(old: Baseline | None, new: Baseline) -> Baseline:
    """The new baseline, with the modes of the old one that were not checked now."""
    if old is None or old.recipe != new.recipe:
        return new
    return replace(new, modes={**old.modes, **new.modes})


def circumstances(old: Baseline, new: Baseline) -> Iterator[str]:
    """What is not the same as when the baseline was written."""
    for name in sorted({*old.versions, *new.versions}):
        was, now = old.versions.get(name), new.versions.get(name)
        if was != now:
            yield f"{name} {was} -> {now}"
    if old.machine != new.machine:
        yield f"machine {old.machine} -> {new.machine}"
    changed = [x for x in new.code if x in old.code and old.code[x] != new.code[x]]
    changed += sorted(set(new.code) ^ set(old.code))
    if changed:
        yield f"code of {', '.join(changed)}"


def changes(old: Baseline, new: Baseline, mode: str) -> Iterator[Finding]:
    """The findings about a mode: what differs by more than is explained, the first of each kind."""
    if old.recipe != new.recipe or mode not in old.modes:
        yield Finding("no_baseline", "", f"it has {old.recipe} in {', '.join(old.modes)}")
        return
    since = "; ".join(circumstances(old, new))
    since = f" (changed since: {since})" if since else ""
    was, now = old.modes[mode], new.modes[mode]
    found = _reference_change(old.reference, new.reference)
    found = found or _loss_change(was, now, bits=old.machine == new.machine and not since)
    if found is not None:
        kind, module, text, at = found
        yield Finding(kind, module, text + since, at=at)
    different = [x for x in {**was.ops, **now.ops} if was.ops.get(x, 0) != now.ops.get(x, 0)]
    if different:
        shown = ", ".join(f"{x} {was.ops.get(x, 0)} -> {now.ops.get(x, 0)}" for x in different[:4])
        yield Finding("casts_changed", "", shown + since)
    before, after = was.peak_bytes.get("peak", 0), now.peak_bytes.get("peak", 0)
    if before and after > GREW * before:
        grown = {
            k: now.peak_bytes[k] - was.peak_bytes.get(k, 0) for k in now.peak_bytes if k != "peak"
        }
        most = max(grown, key=lambda k: grown[k])
        text = f"{before / 2**20:.1f} -> {after / 2**20:.1f} MiB, most of it {most}"
        yield Finding("memory_grew", "", text + since, at=after / before)


Change = tuple[str, str, str, float]
"""Kind, module, text and size of a change."""


def _reference_change(old: BaselineStep | None, new: BaselineStep | None) -> Change | None:
    if old is None or new is None:
        return None
    for what, was, now in (
        ("output of", old.outputs, new.outputs),
        ("gradient of", old.gradients, new.gradients),
        ("loss of", {"the first step": old.loss}, {"the first step": new.loss}),
    ):
        for name, figure in now.items():
            if name not in was:
                return "changed", name, f"{what} {name or 'the model'} is new", 1.0
            if not was[name].is_near(figure.value):
                module = name if what == "output of" else name.rpartition(".")[0]
                text = f"norm of the {what} {name or 'the model'} in float64"
                return "changed", module, _moved(text, was[name], figure.value), 1.0
        if missing := [name for name in was if name not in now]:
            return "changed", missing[0], f"{what} {missing[0]} is gone", 1.0
    return None


def _loss_change(was: ModeBaseline, now: ModeBaseline, bits: bool) -> Change | None:
    for step, (old, new) in enumerate(zip(was.losses, now.losses, strict=False), 1):
        same = f"{old.value:.{DIGITS}g}" == f"{new.value:.{DIGITS}g}"
        near = old.is_near(new.value) or _explained_here(old, new)
        if not (same if bits else near):
            text = f"loss of step {step}"
            text += ", on the same machine and versions," if bits else ""
            return "changed", "", _moved(text, old, new.value), 1.0
    return None


def _explained_here(old: BaselineFigure, new: BaselineFigure) -> bool:
    """Whether what is explained on this machine covers the difference."""
    return abs(new.value - old.value) <= math.hypot(old.explained, new.explained)


def _moved(text: str, old: BaselineFigure, new: float) -> str:
    return f"{text} {old.value:.7g} -> {new:.7g}; explained is {old.explained:.1e}"
