"""Plots of the numbers of training steps: exponents by layer, and the loss scales tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mprun.records.numerics_record import LossScaleResult, NumericsResult, NumericsRow
from mprun.report.numerics_tables import number, share_text
from mprun.report.plots.canvas import figure, save
from mprun.report.theme import FORMATS, Theme

TITLES = {
    "weights": "weights",
    "activations": "activations",
    "activation_gradients": "gradients of activations, unscaled",
    "weight_gradients": "gradients of weights, unscaled",
    "updates": "updates",
}
LIMITS = {
    "fp16": ((-24, "smallest"), (-14, "smallest normal"), (16, "overflow")),
    "bf16": ((-133, "smallest"), (-126, "smallest normal"), (128, "overflow")),
}
LEAST = 1e-6
"""Smaller shares are not drawn."""
MOST_ROWS = 80
"""The most rows drawn of a kind; more could not be read."""


def save_plots(result: NumericsResult, title: str, folder: Path) -> list[str]:
    """Write the plots that there is data for into `folder`; the files' names."""
    paths = save(folder, "numerics", lambda theme: exponents(result, title, theme))
    if result.loss_scale.tried_db:
        paths += save(folder, "loss_scale", lambda theme: scales(result.loss_scale, theme))
    return [path.name for path in paths]


def exponents(result: NumericsResult, title: str, theme: Theme) -> Figure:
    """A panel for each kind: a row for each layer, a column for each power of two."""
    panels = [(kind, _rows(result, kind)) for kind in TITLES]
    panels = [(kind, rows) for kind, rows in panels if rows]
    if not panels:  # only zeros
        return figure(1)
    low, high = _span([row for _, rows in panels for row in rows])
    heights = [1.5 + len(rows) for _, rows in panels]
    made = figure(1.2 + 0.17 * sum(heights))
    axes = made.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for panel, (kind, rows) in zip(axes, panels, strict=True):
        image = _draw_shares(panel, rows, low, high)
        panel.set_title(TITLES[kind], loc="left", pad=11)
        scale = result.loss_scale.recommended if "gradients" in kind else None
        _draw_limits(panel, low, high, scale, theme)
    bar = made.colorbar(image, ax=list(axes), shrink=0.5, aspect=30, pad=0.01)
    bar.ax.yaxis.set_major_formatter(lambda share, _: share_text(share))
    bar.set_label("share of the row's non-zero values")
    axes[-1].set_xlabel("exponent e: values of magnitude 2^e up to 2^(e+1)")
    made.suptitle(_title(result, title, low, high), fontsize=9)
    return made


def _rows(result: NumericsResult, kind: str) -> list[NumericsRow]:
    rows = [row for row in result.rows if row.kind == kind and row.histogram.exponents]
    return rows[:MOST_ROWS]


def _shares(row: NumericsRow) -> Iterator[tuple[int, float]]:
    """Exponents with their share of the row's non-zero values."""
    counts = row.histogram.exponents
    total = sum(counts.values())
    for exponent, count in counts.items():
        if count / total >= LEAST:
            yield int(exponent), count / total


def _span(rows: Sequence[NumericsRow]) -> tuple[int, int]:
    """The exponents shown: all with a share worth drawing, and float16's."""
    drawn = [exponent for row in rows for exponent, _ in _shares(row)]
    return min([*drawn, -25]) - 1, max([*drawn, 16]) + 1


def _draw_shares(panel: Axes, rows: Sequence[NumericsRow], low: int, high: int) -> AxesImage:
    shares = np.full((len(rows), high - low + 1), np.nan)
    for n, row in enumerate(rows):
        for exponent, share in _shares(row):
            shares[n, exponent - low] = share
    image = panel.imshow(
        shares,
        aspect="auto",
        interpolation="nearest",
        extent=(low, high + 1, len(rows), 0),
        cmap="viridis_r",
        norm=LogNorm(LEAST, 1),
    )
    panel.set_yticks([n + 0.5 for n in range(len(rows))], [_short(row.name) for row in rows])
    panel.tick_params(axis="y", labelsize=7)
    return image


def _short(name: str, longest: int = 36) -> str:
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def _draw_limits(panel: Axes, low: int, high: int, scale: float | None, theme: Theme) -> None:
    """The formats' limits; dashed, float16's limits at the recommended loss scale."""
    for name, limits in LIMITS.items():
        colour = theme.series[FORMATS[name]]
        for at, limit in limits:
            if low <= at <= high + 1:
                panel.axvline(at, color=colour, lw=1)
                panel.annotate(
                    f"{name}'s {limit}",
                    (at, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(2, 2),
                    textcoords="offset points",
                    fontsize=6,
                    color=colour,
                )
            if scale is not None and name == "fp16":
                moved = at - math.log2(scale)
                if low <= moved <= high + 1:
                    panel.axvline(moved, color=colour, lw=1, ls="--")


def _title(result: NumericsResult, text: str, low: int, high: int) -> str:
    scale = result.loss_scale.recommended
    if scale is not None:
        text += f"\ndashed: float16's limits at the recommended loss scale, {number(scale)}"
    if low > -126 and high < 128:
        text += "\nbfloat16's limits, 2^-133, 2^-126 and 2^128, lie outside the picture"
    return text


def scales(advice: LossScaleResult, theme: Theme) -> Figure:
    """The SQNR of float16 gradients at each loss scale that was tried."""
    tried = {math.log2(float(scale)): db for scale, db in advice.tried_db.items()}
    finite = {power: db for power, db in tried.items() if math.isfinite(db)}
    made = figure(3.5, width_in=7)
    panel: Axes = made.subplots()
    panel.plot(list(finite), list(finite.values()), "o-", color=theme.ink, ms=4)
    for power in tried.keys() - finite.keys():
        panel.axvspan(power - 0.5, power + 0.5, color=theme.bad, alpha=0.2, lw=0)
    marked = (
        (advice.recommended, theme.good, "recommended"),
        (advice.best_tried, theme.series[0], "best tried"),
    )
    for scale, colour, name in marked:
        if scale is not None:
            panel.axvline(math.log2(scale), color=colour, ls="--", label=name)
    panel.set_xlabel("log2 of the loss scale (shaded: a gradient overflowed)")
    panel.set_ylabel("signal over noise of\nfloat16 gradients, dB")
    panel.legend()
    return made
