"""The plots of trainings: losses and loss scales over the steps; times and memory of a step.

Curves have a panel for each variant, a step's times and memory a row for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from mprun.compare.comparison import Comparison, Variant
from mprun.console.formatting import counted
from mprun.records.run_record import MEMORY_CATEGORIES
from mprun.report import cells
from mprun.report.plots.canvas import (
    TIMES_FACTOR,
    Plot,
    counts,
    figure,
    is_narrow,
    label,
    legend_above,
    mark,
    name_panel,
    name_rows,
    panels,
    seeds,
    spread_axis,
)
from mprun.report.plots.series import (
    Band,
    Column,
    Logs,
    RunSeries,
    band,
    epochs_per_step,
    timed,
)
from mprun.report.theme import LIGHT, colour, marker

LOSSES_FACTOR = 20.0
"""Losses farther apart than this are drawn on a logarithmic axis."""

MAX_MARKS = 25
"""The most validation losses drawn of a variant; of more, every second, third, ..."""


def losses(comparison: Comparison, logs: Logs) -> Plot:
    """The training losses of each variant, with the baseline's behind them."""
    plot = Plot("loss", "Training loss", "", logs.notes)
    bands = [loss_band(runs) for runs in logs.series]
    drawn = [band for band in bands if band is not None]
    if not drawn:
        return plot._replace(caption="No run logged a finite loss.")
    most = max(band.width for band in drawn)
    several = any(len(v.runs) > 1 for v in comparison.variants)
    sentences = [
        f"Line: the median over the runs, {seeds(comparison)}; band: from the lowest to the "
        "highest run."
        if several
        else "One run of each variant.",
        f"A point is the mean of up to {most} steps." if most > 1 else "Each step is a point.",
    ]
    if len(drawn) > 1:
        sentences.append(f"Grey: {cells.plain(comparison.baseline)}.")
    if any(validation(runs) for runs in logs.series):
        sentences.append("Markers: the median validation loss.")
    notes = list(plot.notes)
    for variant, runs, one in zip(comparison.variants, logs.series, bands, strict=True):
        if broken := sum(not np.isfinite(run.steps.loss).all() for run in runs):
            notes.append(
                f"{cells.plain(variant.label)}: {counted(broken)} logged losses that are not "
                "finite; they are left out."
            )
        if one is None:
            notes.append(f"{cells.plain(variant.label)} is missing: it logged no finite loss.")
    return plot._replace(caption=" ".join(sentences), notes=tuple(notes)).drawn(
        f"{cells.plain(comparison.recipe)}: training loss of each variant and of the baseline",
        lambda width_in: _draw_losses(comparison, logs.series, width_in),
    )


def loss_scales(comparison: Comparison, logs: Logs) -> Plot | None:
    """The loss scale of each run that has one; None if no run has."""
    scaling = _scaling(comparison, logs.series)
    if not scaling:
        return None
    plot = Plot("loss-scale", "Loss scale", "")
    runs = [one for i in scaling for one in logs.series[i]]
    scales = {float(x) for one in runs for x in _scales(one)[1]}
    skipped = sum(int(np.sum(one.steps.skipped)) for one in runs)
    if len(scales) == 1 and not skipped:
        names = ", ".join(cells.plain(comparison.variants[i].label) for i in scaling)
        return plot._replace(
            caption=f"It stayed at {scales.pop():g} from the first step to the last in every run "
            f"of {names}, and no step was skipped."
        )
    caption = (
        f"A line for each run of the variants that scale their loss, {seeds(comparison)}. "
        f"Crosses: skipped steps ({skipped} in all)."
    )
    return plot._replace(caption=caption).drawn(
        f"{cells.plain(comparison.recipe)}: history of the loss scale",
        lambda width_in: _draw_loss_scales(comparison, logs.series, scaling, width_in),
    )


def in_epochs(comparison: Comparison) -> bool:
    """Whether curves are over epochs: steps of different batch sizes cannot be compared."""
    sizes = {run.summary.batch_size for v in comparison.variants for run in v.runs}
    return len(sizes) > 1


def _draw_losses(
    comparison: Comparison, series: Sequence[Sequence[RunSeries]], width_in: float
) -> Figure:
    bands = [loss_band(one) for one in series]
    others = [i for i in range(1, len(series)) if bands[i]] or [0]
    made, axes_of = panels(len(others), width_in)
    for index, axes in zip(others, axes_of, strict=True):
        for i in dict.fromkeys((0, index)):
            _loss(axes, comparison, series[i], bands[i], i)
        name_panel(axes, comparison.variants[index], index)
    _loss_axis(axes_of, [b for b in bands if b is not None])
    _titles(made, "training loss", "epoch" if in_epochs(comparison) else "optimizer step")
    return made


def loss_band(runs: Sequence[RunSeries]) -> Band | None:
    """A variant's training losses over its runs."""
    return band([(one.steps.step, one.steps.loss) for one in runs])


def _loss(
    axes: Axes,
    comparison: Comparison,
    runs: Sequence[RunSeries],
    curve: Band | None,
    index: int,
) -> None:
    if curve is None:
        return
    drawn = LIGHT.muted if index == 0 and len(comparison.variants) > 1 else colour(index)
    per_step = epochs_per_step(runs[0].run.summary) if in_epochs(comparison) else 1.0
    axes.fill_between(
        curve.x * per_step, curve.low, curve.high, color=drawn, alpha=0.22, linewidth=0
    )
    axes.plot(curve.x * per_step, curve.middle, color=drawn, linewidth=1.2)
    marks = validation(runs)
    if marks is not None:
        axes.plot(
            marks[0] * per_step,
            marks[1],
            linestyle="none",
            marker=marker(index),
            markersize=3.6,
            markerfacecolor=LIGHT.paper,
            markeredgecolor=drawn,
            markeredgewidth=0.9,
        )


def validation(runs: Sequence[RunSeries]) -> tuple[Column, Column] | None:
    """Steps and the median over runs of the validation loss after them; None without any."""
    at_step: dict[float, list[float]] = {}
    for one in runs:
        for step, loss in zip(*one.validation, strict=True):
            if np.isfinite(step) and np.isfinite(loss):
                at_step.setdefault(float(step), []).append(float(loss))
    if not at_step:
        return None
    steps = sorted(at_step)
    steps = steps[:: -(-len(steps) // MAX_MARKS)]
    return np.array(steps), np.array([np.median(at_step[s]) for s in steps])


def _loss_axis(panels: Sequence[Axes], bands: Sequence[Band]) -> None:
    ends = [float(end) for b in bands for end in (b.low.min(), b.high.max())]
    spread_axis(panels[0], "y", ends, LOSSES_FACTOR)
    for axes in panels:
        axes.grid(axis="y")
        axes.set_axisbelow(True)


def _titles(made: Figure, y: str, x: str) -> None:
    made.supylabel(y, fontsize=8.5, color=LIGHT.muted)
    made.supxlabel(x, fontsize=8.5, color=LIGHT.muted)


def _scaling(comparison: Comparison, series: Sequence[Sequence[RunSeries]]) -> list[int]:
    return [
        i
        for i, (variant, runs) in enumerate(zip(comparison.variants, series, strict=True))
        if any(run.summary.loss_scale.kind != "none" for run in variant.runs)
        and any(len(_scales(one)[0]) for one in runs)
    ]


def _draw_loss_scales(
    comparison: Comparison,
    series: Sequence[Sequence[RunSeries]],
    scaling: Sequence[int],
    width_in: float,
) -> Figure:
    made, axes_of = panels(len(scaling), width_in)
    for index, axes in zip(scaling, axes_of, strict=True):
        for one in series[index]:
            _scale(axes, comparison, one, index)
        name_panel(axes, comparison.variants[index], index)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(base=2, numticks=6))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}")
        )
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y")
    _titles(made, "loss scale", "epoch" if in_epochs(comparison) else "optimizer step")
    return made


def _scales(one: RunSeries) -> tuple[Column, Column, NDArray[np.bool_]]:
    """Steps, loss scales and whether the step was skipped, where both are numbers."""
    steps = one.steps
    keep = np.isfinite(steps.step) & np.isfinite(steps.scale) & (steps.scale > 0)
    return steps.step[keep], steps.scale[keep], steps.skipped[keep]


def _scale(axes: Axes, comparison: Comparison, one: RunSeries, index: int) -> None:
    step, scale, skipped = _scales(one)
    per_step = epochs_per_step(one.run.summary) if in_epochs(comparison) else 1.0
    drawn = colour(index)
    axes.plot(
        step * per_step,
        scale,
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


BINS = 90


def step_times(comparison: Comparison, logs: Logs) -> Plot:
    """The distribution of each variant's step times."""
    plot = Plot("step-time", "Time per step", "", logs.notes)
    times = timed_steps(logs.series, comparison.variants)
    if times is None:
        return plot._replace(caption="No run has timed steps beyond its warm-up.")
    numbers = [len(row) for row in times.rows]
    caption = (
        f"The timed steps of all runs of a variant, {counts(numbers, 'step')}, without warm-up and "
        "partial batches. Area: their distribution. Marker and line: the median, and the tenth to "
        "ninetieth percentile, each of a run and then the median over runs, as in the table."
    )
    notes = list(plot.notes)
    if times.outside:
        share = times.outside / max(1, sum(numbers))
        notes.append(f"{times.outside} steps ({100 * share:.1f} %) lie beyond the axis.")
    if any(cells.is_emulated(v) for v in comparison.variants):
        notes.append("Hollow: emulated, so its times are not comparable.")
    return plot._replace(caption=caption, notes=tuple(notes)).drawn(
        f"{cells.plain(comparison.recipe)}: distribution of step times of each variant",
        lambda width_in: _draw_distributions(comparison, times, width_in),
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
        lambda width_in: _draw_memory(comparison, width_in),
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


def _draw_distributions(comparison: Comparison, times: TimedSteps, width_in: float) -> Figure:
    variants = comparison.variants
    made = figure(0.7 + (0.75 if is_narrow(width_in) else 0.46) * len(variants), width_in)
    axes: Axes = made.subplots()
    is_log = spread_axis(axes, "x", [times.low, times.high], TIMES_FACTOR)
    edges = (np.geomspace if is_log else np.linspace)(times.low, times.high, BINS + 1)
    for index, (variant, row) in enumerate(zip(variants, times.rows, strict=True)):
        heights = np.histogram(row, edges)[0]
        tops, drawn = index - 0.1 - 0.62 * heights / max(heights.max(), 1), colour(index)
        is_filled = not cells.is_emulated(variant)
        axes.stairs(tops, edges, baseline=index - 0.1, fill=is_filled, color=drawn, alpha=0.3)
        step = variant.step_time_ms
        if step is not None:
            axes.plot([step.p10, step.p90], [index, index], color=drawn, linewidth=1.4, zorder=3)
            axes.plot([step.median], [index], **mark(variant, index), zorder=4)
    name_rows(axes, [label(v) for v in variants], above=0.75)
    axes.set_ylim(top=min(-0.85, axes.get_ylim()[1]))
    axes.set_xlabel("time per step (ms)")
    axes.margins(x=0.02)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    return made


def _draw_memory(comparison: Comparison, width_in: float) -> Figure:
    variants = comparison.variants
    unit, size = cells.memory_unit(comparison)
    made = figure(1.05 + (0.54 if is_narrow(width_in) else 0.31) * len(variants), width_in)
    axes: Axes = made.subplots()
    left = np.zeros(len(variants))
    for name, fill in zip(MEMORY_CATEGORIES, LIGHT.memory, strict=True):
        parts = np.array([(v.memory_bytes.get(name) or 0) / size for v in variants])
        axes.barh(
            np.arange(len(variants)),
            parts,
            left=left,
            height=0.56,
            color=fill,
            label=name.replace("_", " "),
            edgecolor=LIGHT.paper,
            linewidth=0.6,
        )
        left += parts
    widest = max(float(left.max()), 1e-9)
    for index, variant in enumerate(variants):
        axes.text(left[index] + 0.012 * widest, index, _total(comparison, variant), va="center")
    name_rows(axes, [label(v) for v in variants], above=0.32)
    axes.set_xlim(0, widest * (1.45 if is_narrow(width_in) else 1.2))
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
