"""Whether formats of 8 bits or fewer pay for linear layers, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.format_record import PAYS_FROM, FormatGains

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
