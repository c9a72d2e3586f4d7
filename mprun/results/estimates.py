"""Estimates of what is not at hand: formats of 8 bits on other GPUs, a step on several processes.

Parts of the record of `mprun doctor recipe=NAME`, and their tables. Each says whether it was
measured, predicted from published rates, or estimated. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.results.memory_result import ParallelKind

PAYS_FROM = 1.05
"""How many times as fast as bfloat16's the products must be, rounding included."""


@dataclass(kw_only=True)
class LayerGain:
    """A layer's three products in a format, with the rounding of their factors."""

    format: str
    """The mode that has it."""
    us: float
    """Microseconds of forward and backward pass."""
    speedup: float
    """bfloat16's time over it."""
    pays: bool
    """Whether the speedup is at least `PAYS_FROM`."""


@dataclass(kw_only=True)
class LayerGains:
    """Layers of one shape."""

    layers: list[str]
    """Their names."""
    samples: int
    """Rows of the input: samples of a micro-batch times the positions of each."""
    in_features: int
    out_features: int
    bfloat16_us: float
    """Microseconds of the three products of one layer."""
    gains: list[LayerGain]


@dataclass(kw_only=True)
class FormatGains:
    """The formats that one GPU multiplies, for each shape of a recipe's linear layers."""

    gpu: str
    source: Literal["measured", "predicted"]
    """predicted: from published rates, by a roofline."""
    basis: str
    """What it was measured or computed with."""
    shapes: list[LayerGains]
    speedup: dict[str, float]
    """Format to that of all layers that a mode converts, summed over them."""


ELSEWHERE = "the output of doctor.json=true"
NO_FORMATS = (
    "formats of 8 bits or fewer: the step calls no linear layer whose features are multiples of 16"
)


def format_parts(found: FormatGains) -> Iterator[FittedTable | str]:
    """The table, and a sentence for each format."""
    yield format_table(found)
    yield from verdicts(found)


def format_table(found: FormatGains) -> FittedTable:
    """A row for each shape: bfloat16's time, and how many times as fast each format is."""
    formats = [*found.speedup] or [g.format for g in found.shapes[0].gains]
    table = FittedTable(
        f"linear layers on {found.gpu}, {found.source.upper()}: speedup over bfloat16",
        text_column("layer"),
        figure_column("number", 3),
        figure_column("samples", 2),
        figure_column("in"),
        figure_column("out"),
        figure_column("bfloat16 us"),
        *[figure_column(name) for name in formats],
        elsewhere=ELSEWHERE,
    )
    for row in found.shapes:
        cells = [f"{gain.speedup:.2f}x" for gain in row.gains]
        table.add_row(
            row.layers[0] or "(model)",
            str(len(row.layers)),
            f"{row.samples:,}",
            f"{row.in_features:,}",
            f"{row.out_features:,}",
            f"{row.bfloat16_us:.3g}",
            *cells,
        )
    table.caption = f"forward, backward and rounding of one layer; {found.basis}"
    return table


def verdicts(found: FormatGains) -> Iterator[str]:
    """A sentence for each format: for how many layers it pays, and what that makes of all."""
    layers = sum(len(row.layers) for row in found.shapes)
    for n, gain in enumerate(found.shapes[0].gains):
        paying = sum(len(row.layers) for row in found.shapes if row.gains[n].pays)
        text = (
            f"{gain.format} pays for {paying} of {layers} linear layers on {found.gpu} "
            f"(at least {PAYS_FROM:g} times as fast), {found.source}"
        )
        if (whole := found.speedup.get(gain.format)) is not None:
            text += f"; precision={gain.format} makes the layers that it converts {_times(whole)}"
        yield text


def _times(speedup: float) -> str:
    if speedup >= 1:
        return f"{speedup:.2f} times as fast"
    return f"slower, by {1 / speedup:.2f} times"


@dataclass(kw_only=True)
class LinkEstimate:
    """A step where all processes are connected by one kind of link."""

    link: str
    gigabytes_per_second: float
    """10^9 bytes a second, of a process in one direction."""
    source: str
    communication_ms: float
    overlapped_ms: float
    """A step whose communication runs beside the computation as far as possible."""
    sequential_ms: float
    """A step whose communication and computation run one after the other."""
    share: float
    """Of communication in the sequential step."""


@dataclass(kw_only=True)
class ScalingEstimate:
    """A step of each of several processes, each with its own batch."""

    estimate: bool
    """True: these times were computed, not measured."""
    world_size: int
    parallel: ParallelKind
    compute_ms: float
    compute_from: Literal["measured step", "least time"]
    """What `compute_ms` is: the median step measured here, or the roofline's least time."""
    gather_dtype: str | None
    """Of gathered parameters; null for ddp."""
    reduce_dtype: str
    """Of gradients that are averaged."""
    sent_bytes: int
    """What each process sends in a step."""
    links: list[LinkEstimate]
    enough_gigabytes_per_second: float
    """With this bandwidth, communication takes a fifth of a sequential step."""
    enough_link: str | None
    """The slowest link of the table that has it; null if none has."""
    assumptions: str


def scaling_parts(scaling: ScalingEstimate) -> Iterator[FittedTable | str]:
    """The parts in the order they are shown."""
    table = FittedTable(
        f"ESTIMATE: a step on {scaling.world_size} processes, {scaling.parallel}",
        text_column("link"),
        figure_column("GB/s", 3),
        figure_column("communication ms"),
        figure_column("share", 1),
        figure_column("step ms"),
        figure_column("speedup", 2),
        elsewhere="the output of doctor.json=true",
    )
    for link in scaling.links:
        table.add_row(*_row(link, scaling))
    yield table
    dtypes = f"gradients in {scaling.reduce_dtype}"
    if scaling.gather_dtype is not None:
        dtypes = f"parameters in {scaling.gather_dtype}, {dtypes}"
    enough = scaling.enough_link or "no link of the table"
    yield (
        f"each process computes {scaling.compute_ms:.3g} ms ({scaling.compute_from}) and sends "
        f"{scaling.sent_bytes / 1e6:,.3g} MB a step ({dtypes}); without overlap, communication "
        f"takes less than 20 % of a step above {scaling.enough_gigabytes_per_second:.3g} GB/s "
        f"({enough})"
    )
    yield f"ESTIMATE, not measured: {scaling.assumptions}"


def _row(link: LinkEstimate, scaling: ScalingEstimate) -> tuple[str, ...]:
    def speedup(step_ms: float) -> str:
        return f"{scaling.world_size * scaling.compute_ms / step_ms:.3g}"

    return (
        link.link,
        f"{link.gigabytes_per_second:.4g}",
        f"{link.communication_ms:.3g}",
        f"{100 * link.share:.0f} %",
        _between(f"{link.overlapped_ms:.3g}", f"{link.sequential_ms:.3g}"),
        _between(speedup(link.sequential_ms), speedup(link.overlapped_ms)),
    )


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low}-{high}"
