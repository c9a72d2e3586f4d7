"""What a configuration would do on other hardware, by the table of check_targets.yaml. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mprun.inspect.check.check_result import ERROR, Finding, ModeChecks, data_file
from mprun.records.console.formatting import UNITS, by_reason, size_text

IN_FLOAT32, EMULATED, ABSENT = "in float32", "emulated", "absent"
HOW = {
    IN_FLOAT32: "each result is computed in float32 and rounded",
    EMULATED: "mprun emulates it in float32, which is no faster",
}
REFUSED = "target_refuses", "it is refused"  # Kind of finding, and its words
AS_ASKED, NOT_RUN = "as asked", "not run here in that arithmetic"


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
    measured: str = ""  # What its first step gave, where each op is computed in float32 and rounded


@dataclass(frozen=True)
class Configuration:
    """What a mode asks of the hardware."""

    uses: Mapping[str, FormatUse] = field(default_factory=dict)
    """Formats, each where it is used first: dtypes, tf32, fp8, mxfp8, nvfp4, float16 partials."""
    native: bool = False
    """Whether it has `execution=native`, which is never replaced by an emulation."""
    scaled: bool = True  # Whether the loss is scaled
    peak_bytes: int = 0  # Of a step


def target_findings(names: Sequence[str], wanted: Configuration) -> Iterator[Finding]:
    """The findings of `refused_or_different`, each once, with the targets that it holds for."""
    alike: dict[Finding, list[str]] = {}
    for name in dict.fromkeys(names):
        for x in refused_or_different(name, wanted):
            alike.setdefault(x, []).append(name)
    for x, targets in alike.items():
        yield replace(x, text=f"on {', '.join(targets)}: {x.text}")


def refused_or_different(name: str, wanted: Configuration) -> Iterator[Finding]:
    """What a configuration would not do on a target as it is asked for; nothing where it would.

    Args:
        name: of the target.
        wanted: the configuration.
    """
    target = TARGETS[name]
    for format_name, use in wanted.uses.items():
        if (lack := target.lacks.get(format_name)) is None:
            continue
        refused = lack.how == ABSENT or (lack.how == EMULATED and wanted.native)
        kind, how = REFUSED if refused else ("target_differs", HOW[lack.how])
        measured = (use.measured or NOT_RUN) if lack.how == IN_FLOAT32 else ""
        texts = [f"{use.text or format_name}: {lack.why}", how, measured]
        yield Finding(kind, use.module, "; ".join(filter(None, texts)), line=use.line)
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
