"""The plots behind the verdicts: the metric against time, and differences against the margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mprun.study.compare.comparison import Comparison, StepPercentiles, Variant
from mprun.study.report import cells
from mprun.study.report.plots.canvas import (
    MAX_LABEL,
    Plot,
    counts,
    figure,
    label,
    mark,
    name_variants,
    seeds,
    spread_axis,
)
from mprun.study.report.theme import LIGHT, colour

# Times are drawn on a logarithmic axis if the largest is more than this factor above the least
TIMES_FACTOR = 8.0


def against_time(comparison: Comparison) -> Plot:
    """The metric of each variant over the time of a step."""
    name = cells.metric_name(comparison)
    plot = Plot("metric-time", f"{comparison.metric.capitalize()} against time", "")
    points = _points(comparison)
    if not points:
        return plot._replace(caption=f"No variant has both a step time and a {name}.")
    margin = cells.difference_text(comparison, comparison.margin, signed=False)
    has_interval = any(v.metric and v.metric.interval for v in comparison.variants)
    caption = (
        f"{name.capitalize()} over the time of an optimizer step, {seeds(comparison)}. Marker: the "
        "mean and the median time. Horizontal line: the tenth to the ninetieth percentile. "
        f"{'Vertical line: the 95 % interval. ' if has_interval else ''}The grey band is "
        f"{cells.plain(comparison.baseline)}'s mean plus and minus the margin, {margin}."
    )
    drawn = {point.row for point in points}
    notes = [
        f"{cells.plain(v.label)} is missing: it has no step time or no metric."
        for i, v in enumerate(comparison.variants)
        if i not in drawn
    ]
    if any(cells.is_emulated(point.variant) for point in points):
        notes.append("Hollow markers are emulated: their times are not comparable.")
    return plot._replace(caption=caption, notes=tuple(notes)).drawn(
        f"{cells.plain(comparison.recipe)}: {name} against time per step",
        lambda: _draw_against_time(comparison, points),
    )


def differences(comparison: Comparison) -> Plot | None:
    """The paired difference of each variant and its intervals; None of a single variant."""
    others = comparison.variants[1:]
    if not others:
        return None
    baseline = cells.plain(comparison.baseline)
    plot = Plot("difference", f"Difference from {baseline}", "")
    pairs = [v.difference.n for v in others if v.difference]
    if not pairs:
        return plot._replace(caption="No other variant has a seed in common with the baseline.")
    intervals = (
        "Thin: the 95 % interval. Thick: the 90 % interval. Where several variants are "
        "judged, the table has the wider intervals that decided, after Holm's adjustment."
    )
    caption = (
        f"{cells.metric_name(comparison).capitalize()} minus that of {baseline}, paired by "
        f"seed, {counts(pairs, 'pair')}. The grey band is the margin. "
        + (intervals if max(pairs) > 1 else "One pair has no interval.")
    )
    return plot._replace(caption=caption).drawn(
        f"{cells.plain(comparison.recipe)}: paired differences of {comparison.metric} from "
        f"{baseline}",
        lambda: _draw_differences(comparison),
    )


class _Point(NamedTuple):
    """A variant in the plot of metric against time, in the units shown."""

    row: int  # In the table
    variant: Variant
    step: StepPercentiles
    metric: float
    low: float
    high: float


def _points(comparison: Comparison) -> list[_Point]:
    points = []
    for index, variant in enumerate(comparison.variants):
        step, metric = variant.step_time_ms, variant.metric
        if step and metric and math.isfinite(metric.value):
            values = (metric.value, *(metric.interval or (metric.value, metric.value)))
            shown = (value * cells.metric_scale(comparison) for value in values)
            points.append(_Point(index, variant, step, *shown))
    return points


def _draw_against_time(comparison: Comparison, points: Sequence[_Point]) -> Figure:
    made = figure(4.3)
    axes: Axes = made.subplots()
    for point in points:
        line: dict[str, Any] = {"color": colour(point.row), "linewidth": 0.9, "zorder": 3.0}
        x, y = point.step.median, point.metric
        axes.plot([point.step.p10, point.step.p90], [y, y], **line)
        axes.plot([x, x], [point.low, point.high], **line)
        axes.plot([x], [y], **mark(point.variant, point.row), zorder=4)
    _draw_margin(axes, comparison)
    unit = cells.metric_unit(comparison)
    axes.set_ylabel(cells.metric_name(comparison) + (f" ({unit})" if unit else ""))
    spread_axis(axes, "x", [point.step.median for point in points], TIMES_FACTOR)
    axes.set_xlabel("time per step (ms)")
    axes.grid(axis="y")
    axes.margins(x=0.16, y=0.14)
    variants = {point.row: point.variant for point in points}
    name_variants(made, variants, loc="outside upper left", ncols=2)
    return made


def _draw_margin(axes: Axes, comparison: Comparison) -> None:
    """The band of differences that do not matter, around the baseline's mean."""
    first = comparison.variants[0].metric
    if first is None or not math.isfinite(first.value):
        return
    size = comparison.margin * (abs(first.value) if comparison.is_relative else 1.0)
    scale = cells.metric_scale(comparison)
    low, high = (scale * (first.value + side * size) for side in (-1, 1))
    axes.axhspan(low, high, color=LIGHT.wash, linewidth=0, zorder=0)


def _draw_differences(comparison: Comparison) -> Figure:
    rows = list(enumerate(comparison.variants))[1:]
    made = figure(0.75 + 0.42 * len(rows))
    axes: Axes = made.subplots()
    scale = cells.DIFFERENCE_SCALE
    margin = comparison.margin * scale
    axes.axvspan(-margin, margin, color=LIGHT.wash, linewidth=0, zorder=0)
    axes.axvline(0, color=LIGHT.muted, linewidth=0.8, zorder=1)
    for index, variant in rows:
        difference = variant.difference
        if difference is None or not math.isfinite(difference.value):
            continue
        line: dict[str, Any] = {"color": colour(index), "solid_capstyle": "butt", "zorder": 3}
        for interval, width in ((difference.interval, 1.0), (variant.equivalence, 3.2)):
            if interval is not None:
                ends = [end * scale for end in interval]
                axes.plot(ends, [index, index], linewidth=width, **line)
        axes.plot([difference.value * scale], [index], **mark(variant, index), zorder=4)
    _name_rows(axes, [f"{label(v)}: {v.verdict.word}" for _, v in rows])
    is_share = cells.difference_unit(comparison) == "difference %"
    name = cells.plain(comparison.baseline, MAX_LABEL)
    axes.set_xlabel(
        f"{cells.metric_name(comparison)} minus that of {name}\n"
        f"({'%' if is_share else 'percentage points'})"
    )
    return made


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Rows 1, 2, ... from the top, each with its name above: a phone has no room beside them."""
    axes.set_yticks([])
    for row, name in enumerate(names, start=1):
        axes.text(0, row - 0.2, name, transform=axes.get_yaxis_transform(), va="bottom")
    axes.set_ylim(len(names) + 0.6, 0.4)
    axes.spines["left"].set_visible(False)
