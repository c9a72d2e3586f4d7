"""Pictures of the numbers of a training step: exponents by layer, and loss scales that were tried.

Drawn without a window and without pyplot, whose state belongs to the user's own program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.report.numerics_tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "weights": "weights",
    "activations": "activations",
    "activation_gradients": "gradients by activations, unscaled",
    "weight_gradients": "gradients by weights, unscaled",
    "updates": "updates",
}
LIMITS = {
    "fp16": ((-24, "smallest"), (-14, "smallest normal"), (16, "overflow")),
    "bf16": ((-133, "smallest"), (-126, "smallest normal"), (128, "overflow")),
}
COLOURS = {"fp16": "#d55e00", "bf16": "#0072b2"}
LEAST = 1e-6
"""Shares below this are not drawn."""
MOST_ROWS = 80
"""Rows drawn of a kind; a picture of more could not be read."""


def save_plots(found: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what there is to draw into `folder`; the files' names."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "mprun", "svg.fonttype": "none"}):
        figures = {"numerics": exponents(found)}
        if found["loss_scale"]["tried_db"]:
            figures["loss_scale"] = scales(found["loss_scale"])
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=110)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return [f"{name}.{suffix}" for name in figures for suffix in ("png", "svg")]


def exponents(found: Mapping[str, Any]) -> Figure:
    """A panel for each kind: a row for each layer, a column for each power of two."""
    from matplotlib.figure import Figure

    panels = [(kind, _rows(found, kind)) for kind in TITLES]
    panels = [(kind, rows) for kind, rows in panels if rows]
    if not panels:  # nothing but zeros anywhere
        return Figure(figsize=(9, 1))
    low, high = _span([row for _, rows in panels for row in rows])
    heights = [1.5 + len(rows) for _, rows in panels]
    figure = Figure(figsize=(9, 1.2 + 0.17 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    image = None
    for panel, (kind, rows) in zip(axes, panels, strict=True):
        image = _heat(panel, rows, low, high)
        panel.set_title(TITLES[kind], fontsize=9, loc="left")
        scale = found["loss_scale"]["recommended"] if "gradients" in kind else None
        _limits(panel, low, high, scale)
    if image is not None:
        bar = figure.colorbar(image, ax=list(axes), shrink=0.5, aspect=30, pad=0.01)
        bar.set_label("share of the row's non-zero values")
        axes[-1].set_xlabel("exponent e: values of magnitude 2^e up to 2^(e+1)")
    figure.suptitle(_title(found, low, high), fontsize=10)
    return figure


def _rows(found: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return [r for r in found["rows"] if r["kind"] == kind and r["histogram"]["exponents"]]


def _shares(row: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    counts = row["histogram"]["exponents"]
    whole = sum(counts.values())
    for exponent, count in counts.items():
        if count / whole >= LEAST:
            yield int(exponent), count / whole


def _span(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """The exponents shown: all that hold a share worth drawing, and float16's."""
    seen = [e for row in rows for e, _ in _shares(row)]
    return min([*seen, -25]) - 1, max([*seen, 16]) + 1


def _heat(panel: Axes, rows: Sequence[Mapping[str, Any]], low: int, high: int) -> Any:
    import numpy as np
    from matplotlib.colors import LogNorm

    rows = rows[:MOST_ROWS]
    shares = np.full((len(rows), high - low + 1), np.nan)
    for n, row in enumerate(rows):
        for exponent, share in _shares(row):
            shares[n, exponent - low] = share
    extent = (low, high + 1, len(rows), 0)
    image = panel.imshow(
        shares,
        aspect="auto",
        interpolation="nearest",
        extent=extent,
        cmap="viridis_r",
        norm=LogNorm(LEAST, 1),
    )
    panel.set_yticks([n + 0.5 for n in range(len(rows))], [_short(r["name"]) for r in rows])
    panel.tick_params(axis="y", labelsize=7, length=0)
    return image


def _short(name: str, longest: int = 36) -> str:
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def _limits(panel: Axes, low: int, high: int, scale: float | None) -> None:
    """The formats' limits; float16's as the recommended loss scale moves them, dashed."""
    for name, limits in LIMITS.items():
        for at, what in limits:
            if low <= at <= high + 1:
                panel.axvline(at, color=COLOURS[name], lw=1)
                panel.annotate(
                    f"{name}'s {what}",
                    (at, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(2, 2),
                    textcoords="offset points",
                    fontsize=6,
                    color=COLOURS[name],
                )
    if scale is not None:
        for at, _ in LIMITS["fp16"]:
            moved = at - math.log2(scale)
            if low <= moved <= high + 1:
                panel.axvline(moved, color=COLOURS["fp16"], lw=1, ls="--")


def _title(found: Mapping[str, Any], low: int, high: int) -> str:
    text = f"{found['recipe']} in {found['variant']}, {found['data']['name']} "
    text += f"({found['data']['source']}), {len(found['steps'])} steps looked at"
    scale = found["loss_scale"]["recommended"]
    if scale is not None:
        text += f"\ndashed: float16's limits at the recommended loss scale, {number(scale)}"
    if low > -126 and high < 128:
        text += "\nbfloat16's limits, 2^-133, 2^-126 and 2^128, lie beyond the picture"
    return text


def scales(loss_scale: Mapping[str, Any]) -> Figure:
    """Signal over noise of float16 gradients at each loss scale that was tried."""
    from matplotlib.figure import Figure

    tried = {float(s): float(db) for s, db in loss_scale["tried_db"].items()}
    kept = {math.log2(s): db for s, db in tried.items() if math.isfinite(db)}
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    panel = figure.subplots()
    panel.plot(list(kept), list(kept.values()), "o-", color="#000000", ms=4)
    for s, db in tried.items():
        if not math.isfinite(db):
            at = math.log2(s)
            panel.axvspan(at - 0.5, at + 0.5, color=COLOURS["fp16"], alpha=0.2, lw=0)
    for key, colour in (("recommended", "#009e73"), ("best_tried", "#0072b2")):
        if loss_scale[key] is not None:
            panel.axvline(
                math.log2(loss_scale[key]), color=colour, ls="--", label=key.replace("_", " ")
            )
    panel.set_xlabel("log2 of the loss scale (shaded: a gradient overflowed)")
    panel.set_ylabel("signal over noise of\nfloat16 gradients, dB")
    panel.legend(frameon=False)
    return figure
