"""The plots over the course of training: losses, and loss scales."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from mprun.compare.rows import Comparison
from mprun.report.plots import canvas
from mprun.report.plots.marks import name_panel
from mprun.report.series import Band, Column, Series, band, epochs_per_step
from mprun.report.theme import Theme, colour, marker

LOG_FROM = 20.0
"""Losses farther apart than this are drawn on a logarithmic axis."""

MOST_MARKS = 25
"""Validation losses drawn of one variant; of more, every second, third, ..."""


def in_epochs(comparison: Comparison) -> bool:
    """Whether curves are over epochs: where batch sizes differ, steps cannot be compared."""
    sizes = {run.summary.batch_size for v in comparison.variants for run in v.runs}
    return len(sizes) > 1


def losses(comparison: Comparison, series: Sequence[Sequence[Series]], theme: Theme) -> Figure:
    """A panel for each variant, with the baseline's curve behind it."""
    bands = [loss_band(one) for one in series]
    others = [i for i in range(1, len(series)) if bands[i]] or [0]
    made, panels = canvas.panels(len(others))
    for index, axes in zip(others, panels, strict=True):
        for i in dict.fromkeys((0, index)):
            _loss(axes, comparison, series[i], bands[i], i, theme)
        name_panel(axes, comparison.variants[index], index, theme)
    _loss_axis(panels, [b for b in bands if b is not None])
    _titles(made, "training loss", "epoch" if in_epochs(comparison) else "optimizer step", theme)
    return made


def loss_band(runs: Sequence[Series]) -> Band | None:
    """A variant's training losses over its runs."""
    return band([(one.steps.step, one.steps.loss) for one in runs])


def _loss(
    axes: Axes,
    comparison: Comparison,
    runs: Sequence[Series],
    found: Band | None,
    index: int,
    theme: Theme,
) -> None:
    if found is None:
        return
    drawn = theme.muted if index == 0 and len(comparison.variants) > 1 else colour(theme, index)
    per_step = epochs_per_step(runs[0].run.summary) if in_epochs(comparison) else 1.0
    axes.fill_between(
        found.x * per_step, found.low, found.high, color=drawn, alpha=0.22, linewidth=0
    )
    axes.plot(found.x * per_step, found.middle, color=drawn, linewidth=1.2)
    marks = validation(runs)
    if marks is not None:
        axes.plot(
            marks[0] * per_step,
            marks[1],
            linestyle="none",
            marker=marker(index),
            markersize=3.6,
            markerfacecolor=theme.paper,
            markeredgecolor=drawn,
            markeredgewidth=0.9,
        )


def validation(runs: Sequence[Series]) -> tuple[Column, Column] | None:
    """Steps and the median over runs of the validation loss after them; None without any."""
    found: dict[float, list[float]] = {}
    for one in runs:
        for step, loss in zip(*one.validation, strict=True):
            if np.isfinite(step) and np.isfinite(loss):
                found.setdefault(float(step), []).append(float(loss))
    if not found:
        return None
    steps = sorted(found)
    steps = steps[:: -(-len(steps) // MOST_MARKS)]
    return np.array(steps), np.array([np.median(found[s]) for s in steps])


def _loss_axis(panels: Sequence[Axes], bands: Sequence[Band]) -> None:
    lows, highs = [b.low.min() for b in bands], [b.high.max() for b in bands]
    if bands and min(lows) > 0 and max(highs) / min(lows) > LOG_FROM:
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels[0].yaxis.set_minor_locator(NullLocator())
    for axes in panels:
        axes.grid(axis="y")
        axes.set_axisbelow(True)


def _titles(made: Figure, y: str, x: str, theme: Theme) -> None:
    made.supylabel(y, fontsize=8.5, color=theme.muted)
    made.supxlabel(x, fontsize=8.5, color=theme.muted)


def scaling(comparison: Comparison, series: Sequence[Sequence[Series]]) -> list[int]:
    """The variants with a loss scale and lines that tell it."""
    return [
        i
        for i, (variant, runs) in enumerate(zip(comparison.variants, series, strict=True))
        if any(run.summary.loss_scale.kind != "none" for run in variant.runs)
        and any(len(_scales(one)[0]) for one in runs)
    ]


def loss_scales(comparison: Comparison, series: Sequence[Sequence[Series]], theme: Theme) -> Figure:
    """A panel for each variant that scales, a line for each of its runs."""
    shown = scaling(comparison, series)
    made, panels = canvas.panels(len(shown))
    for index, axes in zip(shown, panels, strict=True):
        for one in series[index]:
            _scale(axes, comparison, one, index, theme)
        name_panel(axes, comparison.variants[index], index, theme)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(base=2, numticks=6))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}")
        )
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y")
    _titles(made, "loss scale", "epoch" if in_epochs(comparison) else "optimizer step", theme)
    return made


def _scales(one: Series) -> tuple[Column, Column, NDArray[np.bool_]]:
    """Steps, loss scales and whether the step was skipped, where both are numbers."""
    steps = one.steps
    keep = np.isfinite(steps.step) & np.isfinite(steps.scale) & (steps.scale > 0)
    return steps.step[keep], steps.scale[keep], steps.skipped[keep]


def _scale(axes: Axes, comparison: Comparison, one: Series, index: int, theme: Theme) -> None:
    step, scale, skipped = _scales(one)
    per_step = epochs_per_step(one.run.summary) if in_epochs(comparison) else 1.0
    kept = changes(scale, skipped)
    drawn = colour(theme, index)
    axes.plot(
        step[kept] * per_step,
        scale[kept],
        drawstyle="steps-post",
        color=drawn,
        linewidth=1.1,
        alpha=0.8,
    )
    axes.plot(
        step[skipped] * per_step,
        scale[skipped],
        linestyle="none",
        marker="x",
        markersize=4,
        color=drawn,
    )


def constant_scale(runs: Sequence[Series]) -> float | None:
    """The loss scale of all runs' steps where it never changed; None where it did."""
    found = {float(x) for one in runs for x in _scales(one)[1]}
    return found.pop() if len(found) == 1 else None


def changes(scale: Column, skipped: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The places a line needs: both ends of every level, and the skipped steps."""
    if not len(scale):
        return np.zeros(0, dtype=bool)
    differs = np.diff(scale) != 0
    kept: NDArray[np.bool_] = np.r_[True, differs] | np.r_[differs, True] | skipped
    return kept
