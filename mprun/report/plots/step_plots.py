"""The plots of a step, a row for each variant: the distribution of its times, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mprun.compare.comparison import Comparison, Variant
from mprun.records.run_record import MEMORY_CATEGORIES
from mprun.report import cells
from mprun.report.plots.canvas import (
    Plot,
    counts,
    face,
    figure,
    label,
    legend_above,
    mark,
    name_rows,
    times_axis,
)
from mprun.report.plots.series import Column, Logs, RunSeries, timed
from mprun.report.theme import Theme, colour

BINS = 90
FEWEST = 40
"""Fewer steps than this are drawn as single strokes, not as an outline."""


def step_times(comparison: Comparison, logs: Logs) -> Plot:
    """The distribution of each variant's step times."""
    plot = Plot("step-time", "Time per step", "", logs.notes)
    times = timed_steps(logs.series, comparison.variants)
    if times is None:
        return plot._replace(caption="No run has timed steps beyond its warm-up.")
    numbers = [len(row) for row in times.rows]
    caption = (
        f"The timed steps of all runs of a variant, {counts(numbers, 'step')}, without warm-up and "
        "partial batches. Outline: their distribution (a stroke for each step if there are fewer "
        f"than {FEWEST}). Marker and line: the median, and the tenth to ninetieth "
        "percentile, as in the table."
    )
    notes = list(plot.notes)
    if times.outside:
        share = times.outside / max(1, sum(numbers))
        notes.append(f"{times.outside} steps ({100 * share:.1f} %) lie beyond the axis.")
    if any(cells.is_emulated(v) for v in comparison.variants):
        notes.append("Hollow: emulated, so its times are not comparable.")
    return plot._replace(caption=caption, notes=tuple(notes)).drawn(
        f"{cells.plain(comparison.recipe)}: distribution of step times of each variant",
        lambda theme: _draw_distributions(comparison, times, theme),
    )


def memory(comparison: Comparison) -> Plot:
    """The memory of each variant's step by category."""
    plot = Plot("memory", "Memory of a step", "")
    if not any(v.memory_bytes.get(name) for v in comparison.variants for name in MEMORY_CATEGORIES):
        return plot._replace(caption="The memory of a step is not known for any run.")
    caption = (
        "Memory at the peak of a training step, counted from the tensors of a step on fake "
        "tensors. It is the same for every seed; for emulated variants it is that of the mode, not "
        "of its emulation. Blue: tensors that live as long as the model; brown: those that a step "
        "makes and frees."
    )
    return plot._replace(caption=caption).drawn(
        f"{cells.plain(comparison.recipe)}: peak memory of a training step by category",
        lambda theme: _draw_memory(comparison, theme),
    )


class TimedSteps(NamedTuple):
    """The timed steps of each variant, and the span of the axis."""

    rows: list[Column]
    low: float
    high: float
    outside: int
    """Steps beyond the axis."""


def timed_steps(
    series: Sequence[Sequence[RunSeries]], variants: Sequence[Variant]
) -> TimedSteps | None:
    """The times to draw; None if there are none.

    The axis ends at the 99th percentile of the slowest variant. Otherwise one step during which the
    machine was busy would compress all others.
    """
    rows = [np.concatenate([timed(one) for one in runs] or [np.zeros(0)]) for runs in series]
    rows = [row[row > 0] for row in rows]
    lows = [float(np.quantile(row, 0.01)) for row in rows if len(row)]
    highs = [float(np.quantile(row, 0.99)) for row in rows if len(row)]
    lows += [v.step_time_ms.p10 for v in variants if v.step_time_ms]
    highs += [v.step_time_ms.p90 for v in variants if v.step_time_ms]
    if not highs or min(lows) <= 0:
        return None
    low, high = min(lows), max(highs)
    outside = sum(int(((row < low) | (row > high)).sum()) for row in rows)
    return TimedSteps(rows, low, high, outside)


def _draw_distributions(comparison: Comparison, times: TimedSteps, theme: Theme) -> Figure:
    variants = comparison.variants
    made = figure(0.7 + 0.46 * len(variants))
    axes: Axes = made.subplots()
    times_axis(axes, [times.low, times.high])
    is_log = axes.get_xscale() == "log"
    space = np.geomspace if is_log else np.linspace
    edges = space(times.low, times.high, BINS + 1)
    for index, (variant, row) in enumerate(zip(variants, times.rows, strict=True)):
        _outline(axes, row, edges, index, variant, theme)
        step = variant.step_time_ms
        if step is not None:
            drawn = colour(theme, index)
            axes.plot([step.p10, step.p90], [index, index], color=drawn, linewidth=1.4, zorder=3)
            axes.plot([step.median], [index], **mark(theme, variant, index), zorder=4)
    name_rows(axes, [label(v) for v in variants])
    axes.set_ylim(top=-0.85)
    axes.set_xlabel("time per step (ms)")
    axes.margins(x=0.02)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    return made


def _outline(
    axes: Axes, row: Column, edges: Column, index: int, variant: Variant, theme: Theme
) -> None:
    drawn, inside = colour(theme, index), row[(row >= edges[0]) & (row <= edges[-1])]
    if len(row) < FEWEST:
        axes.vlines(inside, index - 0.3, index - 0.12, color=drawn, linewidth=0.8)
        return
    heights = smooth(np.histogram(inside, edges)[0].astype(np.float64))
    tops = index - 0.1 - 0.62 * heights / max(heights.max(), 1e-9)
    places = np.sqrt(edges[1:] * edges[:-1])
    there = slice(*(np.flatnonzero(heights)[[0, -1]] + [0, 1])) if heights.any() else slice(0)
    places, tops = places[there], tops[there]
    fill = "none" if cells.is_emulated(variant) else face(theme, variant, index)
    axes.fill_between(places, tops, index - 0.1, color=fill, alpha=0.3, linewidth=0)
    axes.plot(places, tops, color=drawn, linewidth=0.8)


def smooth(counts: Column) -> Column:
    """Counts averaged with their neighbours, the nearer the more."""
    kernel = np.array([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    smoothed: Column = np.convolve(counts, kernel, mode="same")
    return smoothed


def _draw_memory(comparison: Comparison, theme: Theme) -> Figure:
    variants = comparison.variants
    unit, size = cells.memory_unit(comparison)
    made = figure(1.05 + 0.31 * len(variants))
    axes: Axes = made.subplots()
    left = np.zeros(len(variants))
    for name, fill in zip(MEMORY_CATEGORIES, theme.memory, strict=True):
        parts = np.array([(v.memory_bytes.get(name) or 0) / size for v in variants])
        axes.barh(
            np.arange(len(variants)),
            parts,
            left=left,
            height=0.56,
            color=fill,
            label=name.replace("_", " "),
            edgecolor=theme.paper,
            linewidth=0.6,
        )
        left += parts
    widest = max(float(left.max()), 1e-9)
    for index, variant in enumerate(variants):
        axes.text(left[index] + 0.012 * widest, index, _total(comparison, variant), va="center")
    name_rows(axes, [label(v) for v in variants])
    axes.set_xlim(0, widest * 1.2)
    axes.set_xlabel(f"alive at the peak of a training step ({unit})")
    legend_above(made, axes)
    return made


def _total(comparison: Comparison, variant: Variant) -> str:
    """The text at the end of a bar: the peak, and its ratio."""
    peak = cells.peak(variant)
    if peak is None:
        return "not known"
    ratio = None if cells.is_emulated(variant) else variant.memory_ratio
    text = f"{cells.memory(comparison, peak)} {cells.memory_unit(comparison)[0]}"
    if ratio is None or variant is comparison.variants[0]:
        return text
    return f"{text}, {cells.times(ratio)}"
