"""What other hardware has, as data, and what a configuration would do there. No torch.

A format that a target does not name is native there. Sources, by their short names in the table:

    CC    NVIDIA, "CUDA C++ Programming Guide", compute capabilities; "CUDA GPU Compute Capability"
    TE    NVIDIA, "Transformer Engine", datatype and hardware support matrix
    DATA  NVIDIA's data sheets of the four GPUs; memory of each model that is sold
    CUDNN cuDNN has no bfloat16 convolutions below 8.0: huggingface/diffusers pull 14129
    BF16  what PyTorch does without bfloat16 units: pytorch/pytorch issue 124996, pull 148322
    WHEEL kernels in PyTorch's wheels: pytorch/pytorch issue 172352, test-infra pull 8739
    MPS   PyTorch, "MPS backend" (no float64); pytorch/pytorch pull 119641 (bfloat16, macOS 14)
    DNN   oneDNN, "Data Types", hardware limitations; pytorch/pytorch issue 97068 (float16)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mprun.console.formatting import UNITS, size_text
from mprun.results.check_result import ERROR, Finding, ModeChecks

IN_FLOAT32, EMULATED, ABSENT = "in float32", "emulated", "absent"
"""How a format is treated that a target has no units for: each op is computed in float32 and its
result rounded; mprun emulates it, or refuses `execution=native`; it cannot be stored at all."""


HOW = {
    IN_FLOAT32: "each result is computed in float32 and rounded",
    EMULATED: "mprun emulates it in float32, which is no faster",
}
AS_ASKED = "as asked"
REFUSED, NOT_RUN = "it is refused", "not run here in that arithmetic"


class Lack(NamedTuple):
    """A format without units for it."""

    how: str
    why: str
    source: str


class Target(NamedTuple):
    """Other hardware."""

    device: str
    """The type of its `torch.device`."""
    memory_gib: tuple[float, ...]
    """Of each model that is sold, the smallest first; empty where it is the machine's."""
    lacks: Mapping[str, Lack]
    source: str
    note: str = ""


BLOCKS = dict.fromkeys(
    ("mxfp8", "nvfp4"), Lack(EMULATED, "its products need compute capability 10.0", "TE")
)
NO_FLOAT8 = {"fp8": Lack(EMULATED, "its products need compute capability 8.9", "TE"), **BLOCKS}
NO_AMPERE = {
    "bfloat16": Lack(
        IN_FLOAT32,
        "no units for it before compute capability 8.0, so it is slower than float16; no cuDNN "
        "convolutions",
        "CC, BF16, CUDNN",
    ),
    "tf32": Lack(EMULATED, "TensorFloat-32 needs compute capability 8.0", "CC"),
    **NO_FLOAT8,
}
NOT_NVIDIA = {
    **dict.fromkeys(
        ("tf32", "fp8", "mxfp8", "nvfp4"), Lack(EMULATED, "only NVIDIA's GPUs have it", "CC, TE")
    ),
    "float16 partials": Lack(EMULATED, "no switch for what products accumulate in", "CC"),
}
NO_INSTRUCTIONS = {
    "bfloat16": Lack(IN_FLOAT32, "needs AVX512-BF16 or AMX-BF16", "DNN"),
    "float16": Lack(IN_FLOAT32, "needs AVX512-FP16 or AMX-FP16", "DNN"),
}
NO_FLOAT64 = Lack(ABSENT, "the MPS backend has no float64", "MPS")
TARGETS = {
    "t4": Target("cuda", (16,), NO_AMPERE, "CC, DATA"),
    "v100": Target(
        "cuda",
        (16, 32),
        NO_AMPERE,
        "CC, DATA, WHEEL",
        "PyTorch's wheels have kernels for it up to 2.14, from 2.11 on only those of CUDA 12.6",
    ),
    "a100": Target("cuda", (40, 80), NO_FLOAT8, "CC, DATA"),
    "h100": Target("cuda", (80, 94), BLOCKS, "CC, DATA"),
    "mps": Target("mps", (), {**NOT_NVIDIA, "float64": NO_FLOAT64}, "MPS"),
    "cpu-avx2": Target("cpu", (), {**NOT_NVIDIA, **NO_INSTRUCTIONS}, "CC, TE, DNN"),
}
"""By the names of `check.targets`; the compute capabilities of the GPUs are 7.5, 7.0, 8.0, 9.0."""
FLOAT16_LEAST = 2.0**-24


class FormatUse(NamedTuple):
    """Where a configuration uses a format."""

    module: str = ""
    line: str = ""
    text: str = ""
    """What uses it, if that is not the format itself."""
    measured: str = ""
    """What its first step gave, where each op is computed in float32 and rounded."""


@dataclass(frozen=True)
class Configuration:
    """What a mode asks of the hardware."""

    uses: Mapping[str, FormatUse] = field(default_factory=dict)
    """Formats, each where it is used first: dtypes, tf32, fp8, mxfp8, nvfp4, float16 partials."""
    native: bool = False
    """Whether it has `execution=native`, which is never replaced by an emulation."""
    scaled: bool = True
    """Whether the loss is scaled."""
    peak_bytes: int = 0
    """Of a step."""


def target_findings(names: Sequence[str], wanted: Configuration) -> Iterator[Finding]:
    """The findings of `refused_or_different`, each once, with the targets that it holds for."""
    found: dict[Finding, list[str]] = {}
    for name in dict.fromkeys(names):
        for x in refused_or_different(name, wanted):
            found.setdefault(x, []).append(name)
    for x, targets in found.items():
        yield replace(x, text=f"on {', '.join(targets)}: {x.text}")


def refused_or_different(name: str, wanted: Configuration) -> Iterator[Finding]:
    """What a configuration would not do on a target as it is asked for; nothing where it would.

    Args:
        name: of the target.
        wanted: the configuration.
    """
    target = TARGETS[name]
    for format_name, use in wanted.uses.items():
        lack = target.lacks.get(format_name)
        if lack is None:
            continue
        refused = lack.how == ABSENT or (lack.how == EMULATED and wanted.native)
        kind = "target_refuses" if refused else "target_differs"
        how = REFUSED if refused else HOW[lack.how]
        measured = (use.measured or NOT_RUN) if lack.how == IN_FLOAT32 else ""
        said = [f"{use.text or format_name}: {lack.why}", how, measured]
        yield Finding(kind, use.module, "; ".join(filter(None, said)), line=use.line)
    if target.device != "cpu" and "float16" in wanted.uses and not wanted.scaled:
        yield Finding(
            "target_differs",
            wanted.uses["float16"].module,
            f"float16 without a loss scale (loss_scale=none): gradients below "
            f"{FLOAT16_LEAST:.0e} become 0; leave out loss_scale=none",
        )
    yield from _too_large(name, wanted.peak_bytes)


def _too_large(name: str, peak_bytes: int) -> Iterator[Finding]:
    fits = [gib for gib in TARGETS[name].memory_gib if peak_bytes <= gib * UNITS["GiB"]]
    sold = TARGETS[name].memory_gib
    if len(fits) == len(sold):
        return
    step = f"a step takes {size_text(peak_bytes)}"
    if fits:
        yield Finding("target_differs", "", f"{step}, and only models with {fits[0]:g} GiB have it")
    else:
        yield Finding("target_refuses", "", f"{step}, and it has {sold[-1]:g}")


def figure(found: Iterable[Finding]) -> str:
    """What the record says of a mode on a target."""
    severities = {x.severity for x in found}
    return "refused" if ERROR in severities else "differs" if severities else AS_ASKED


def target_lines(targets: Sequence[str], modes: Sequence[ModeChecks]) -> Iterator[str]:
    """A line for each target: what each mode would do there."""
    for name in dict.fromkeys(targets):
        labels: dict[str, list[str]] = {}
        for mode in modes:
            figure = str(mode.figures.get(f"target {name}", "not checked"))
            labels.setdefault(figure, []).append(mode.label)
        text = "; ".join(f"{how}: {', '.join(x)}" for how, x in labels.items())
        note = f" ({TARGETS[name].note})" if TARGETS[name].note else ""
        yield f"{name}: {f'runs {AS_ASKED}' if [*labels] == [AS_ASKED] else text}{note}"
