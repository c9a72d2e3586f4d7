"""A recipe's step on this machine: its share of the roof, and whether formats of 8 bits pay.

Parts of the record of `mprun doctor recipe=NAME`, and how they are shown. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mprun.records.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.console.formatting import significant
from mprun.records.run_record import StepTimes

# ---- the share of the roof -----------------------------------------------------------------------


@dataclass(kw_only=True)
class Roofline:
    """The least time of a step's products, and the share of the step that it is."""

    recipe: str
    precision: str
    variant: str
    execution: str  # native or emulated
    batch_size: int
    flops: int | None = None
    """Multiplications and additions of a step; null in records of schema version 1."""
    gflops: dict[str, float]
    """The mode's number format to its best measured rate, 10^9 operations a second."""
    least_ms: float
    """The FLOPs over the rate. In schema version 1 also the time to move the bytes of each op."""
    step_time_ms: StepTimes
    share: float | None  # `least_ms` over the median step; null where no step was timed
    notes: list[str]  # What limits the figures, a sentence each


def roofline_parts(roof: Roofline) -> Iterator[str]:
    """The parts in the order they are shown."""
    yield summary(roof)
    yield from roof.notes


def summary(roof: Roofline) -> str:
    """The bound, and the share of it that is reached."""
    rates = ", ".join(f"{rate:,.0f} GFLOP/s ({name})" for name, rate in roof.gflops.items())
    what = f"{roof.recipe}, {roof.variant}, batch {roof.batch_size}"
    least = f"at least {significant(roof.least_ms)} ms"
    work = f"its {(roof.flops or 0) / 1e9:.3g} GFLOP at {rates}"
    times = roof.step_time_ms
    if times.median is None or roof.share is None:
        return f"{what}: a step takes {least}, {work}"
    spread = f"{significant(times.p10)}-{significant(times.p90)}"
    return (
        f"{what}: a step takes {significant(times.median)} ms ({spread}, {times.n} steps), "
        f"{least}, {work}: it reaches {100 * roof.share:.0f} % of the roof"
    )


# ---- formats of 8 bits or fewer ------------------------------------------------------------------

PAYS_FROM = 1.05  # a smaller gain is within the noise of a step, and no reason to risk accuracy
NO_LAYERS = (
    "formats of 8 bits or fewer: the step calls no linear layer whose features are multiples of 16"
)
NO_UNITS = "formats of 8 bits or fewer: none pays here, {}"


class Shape(NamedTuple):
    """A linear layer's forward pass."""

    samples: int
    in_features: int
    out_features: int


@dataclass(kw_only=True)
class LayerGain:
    """A layer's three products in a format, with the rounding of their factors."""

    format: str  # The mode that has it
    us: float  # Microseconds of forward and backward pass
    speedup: float  # bfloat16's time over it
    pays: bool  # Whether the speedup is at least `PAYS_FROM`


@dataclass(kw_only=True)
class LayerGains:
    """Layers of one shape."""

    layers: list[str]  # Their names
    samples: int  # Rows of the input: samples of a micro-batch times the positions of each
    in_features: int
    out_features: int
    bfloat16_us: float  # Microseconds of the three products of one layer
    gains: list[LayerGain]


@dataclass(kw_only=True)
class FormatGains:
    """The formats that a GPU multiplies, for each shape of a recipe's linear layers."""

    gpu: str
    source: Literal["measured", "predicted"] = "measured"
    """predicted: in records of schema version 1, from published rates of another GPU."""
    basis: str  # What it was measured with
    shapes: list[LayerGains]
    speedup: dict[str, float]  # Format to that of all layers that a mode converts, summed over them


def format_parts(found: FormatGains) -> Iterator[FittedTable | str]:
    """The table, and a sentence for each format."""
    yield FittedTable(
        f"linear layers on {found.gpu}, {found.source.upper()}: speedup over bfloat16",
        text_column("layer", cell=lambda row: row.layers[0] or "(model)"),
        figure_column("number", 3, lambda row: str(len(row.layers))),
        figure_column("samples", 2, lambda row: f"{row.samples:,}"),
        figure_column("in", cell=lambda row: f"{row.in_features:,}"),
        figure_column("out", cell=lambda row: f"{row.out_features:,}"),
        figure_column("bfloat16 us", cell=lambda row: f"{row.bfloat16_us:.3g}"),
        *(
            figure_column(gain.format, cell=lambda row, n=n: f"{row.gains[n].speedup:.2f}x")  # type: ignore[misc]
            for n, gain in enumerate(found.shapes[0].gains)
        ),
        rows=found.shapes,
        elsewhere="the output of doctor.json=true",
        caption=f"forward, backward and rounding of one layer; {found.basis}",
    )
    yield from verdicts(found)


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
            change = f"{whole:.2f} times as fast"
            if whole < 1:
                change = f"slower, by {1 / whole:.2f} times"
            text += f"; precision={gain.format} makes the layers that it converts {change}"
        yield text
