"""The plots of what decides: the metric against time, and the differences against the margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from mprun.compare.rows import Comparison, Estimate, Variant
from mprun.report import cells
from mprun.report.plots import canvas
from mprun.report.plots.labels import Box, Placed, place
from mprun.report.plots.marks import (
    LONGEST_LABEL,
    MARKER_SIZE,
    label,
    mark,
    name_rows,
    times_axis,
)
from mprun.report.theme import Theme, colour


def metric_title(comparison: Comparison) -> str:
    """The metric's axis title."""
    unit = cells.metric_unit(comparison)
    return cells.metric_name(comparison) + (f" ({unit})" if unit else "")


def points(comparison: Comparison) -> list[tuple[int, Variant]]:
    """The variants with a step time and a finite metric, and their places in the table."""
    return [
        (index, variant)
        for index, variant in enumerate(comparison.variants)
        if variant.step_time_ms and variant.metric and math.isfinite(variant.metric.value)
    ]


def against_time(comparison: Comparison, theme: Theme) -> Figure:
    """A point for each variant: the metric over the time of a step."""
    made = canvas.figure(4.3)
    axes: Axes = made.subplots()
    shown = points(comparison)
    for index, variant in shown:
        _point(axes, comparison, variant, index, theme)
    _margin(axes, comparison, theme)
    axes.set_ylabel(metric_title(comparison))
    times_axis(axes, [v.step_time_ms.median for _, v in shown if v.step_time_ms])
    axes.set_xlabel("time per step (ms)")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.margins(x=0.16, y=0.14)
    _name_points(made, axes, comparison, shown)
    return made


def _point(axes: Axes, comparison: Comparison, variant: Variant, index: int, theme: Theme) -> None:
    metric, step = variant.metric, variant.step_time_ms
    assert metric is not None
    assert step is not None
    drawn = colour(theme, index)
    x, y = step.median, cells.in_metric_units(comparison, metric.value)
    around = [
        cells.in_metric_units(comparison, end) for end in metric.interval or (metric.value,) * 2
    ]
    line: dict[str, Any] = {"color": drawn, "linewidth": 0.9, "zorder": 3.0}
    axes.plot([step.p10, step.p90], [y, y], **line)
    axes.plot([x, x], around, **line)
    axes.plot([x], [y], **mark(theme, variant, index), zorder=4)


def _margin(axes: Axes, comparison: Comparison, theme: Theme) -> None:
    """The band that holds what does not matter, around the baseline's mean."""
    first = comparison.variants[0].metric
    if first is None or not math.isfinite(first.value):
        return
    size = comparison.margin * (abs(first.value) if comparison.is_relative else 1.0)
    low, high = (cells.in_metric_units(comparison, first.value + s * size) for s in (-1, 1))
    axes.axhspan(low, high, color=theme.wash, linewidth=0, zorder=0)


def _name_points(
    made: Figure, axes: Axes, comparison: Comparison, shown: Sequence[tuple[int, Variant]]
) -> None:
    """Labels beside the points, placed once the layout is known."""
    agg = FigureCanvasAgg(made)
    agg.draw()
    made.set_layout_engine("none")
    frame = axes.get_window_extent()
    centres, sizes, obstacles = [], [], []
    for _, variant in shown:
        assert variant.metric is not None
        assert variant.step_time_ms is not None
        y = cells.in_metric_units(comparison, variant.metric.value)
        centre = axes.transData.transform((variant.step_time_ms.median, y))
        text = axes.text(0, 0, label(variant))
        size = text.get_window_extent(agg.get_renderer())
        text.remove()
        centres.append((float(centre[0]), float(centre[1])))
        sizes.append((size.width + 4, size.height + 3))
        obstacles += _occupied(axes, comparison, variant)
    spots = place(centres, sizes, obstacles, _box(frame))
    for (_, variant), point, spot in zip(shown, centres, spots, strict=True):
        _write(axes, label(variant), point, spot)


def _occupied(axes: Axes, comparison: Comparison, variant: Variant) -> list[Box]:
    """Where a point's marker and its two bars are."""
    metric, step = variant.metric, variant.step_time_ms
    assert metric is not None
    assert step is not None
    y = cells.in_metric_units(comparison, metric.value)
    ends = metric.interval or (metric.value, metric.value)
    low, high = (cells.in_metric_units(comparison, end) for end in ends)
    corners = [
        ((step.p10, y), (step.p90, y), 1.0),
        ((step.median, low), (step.median, high), 1.0),
        ((step.median, y), (step.median, y), MARKER_SIZE / 2 + 1),
    ]
    found = []
    for first, second, around in corners:
        (x0, y0), (x1, y1) = axes.transData.transform([first, second])
        found.append(Box(x0 - around, y0 - around, x1 - x0 + 2 * around, y1 - y0 + 2 * around))
    return found


def _box(found: Bbox) -> Box:
    return Box(found.x0, found.y0, found.width, found.height)


def _write(axes: Axes, text: str, point: tuple[float, float], spot: Placed) -> None:
    to_data, box = axes.transData.inverted().transform, spot.box
    middle = (box.x + box.width / 2, box.y + box.height / 2)
    if spot.is_far:
        end = (
            min(max(point[0], box.x), box.x + box.width),
            min(max(point[1], box.y), box.y + box.height),
        )
        xs, ys = zip(to_data(point), to_data(end), strict=True)
        axes.plot(xs, ys, linewidth=0.5, color=axes.xaxis.label.get_color(), zorder=2)
    x, y = to_data(middle)
    axes.text(x, y, text, ha="center", va="center", zorder=5)


def differences(comparison: Comparison, theme: Theme) -> Figure:
    """A row for each variant but the baseline: difference and intervals against the margin."""
    rows = list(enumerate(comparison.variants))[1:]
    made = canvas.figure(0.75 + 0.33 * len(rows))
    axes: Axes = made.subplots()
    margin = cells.in_difference_units(comparison, comparison.margin)
    axes.axvspan(-margin, margin, color=theme.wash, linewidth=0, zorder=0)
    axes.axvline(0, color=theme.muted, linewidth=0.8, zorder=1)
    for index, variant in rows:
        if variant.difference is not None and math.isfinite(variant.difference.value):
            _difference(axes, comparison, variant, index, variant.difference, theme)
    name_rows(axes, [label(v) for _, v in rows], first=1)
    right = axes.secondary_yaxis("right")
    right.set_yticks([i for i, _ in rows], [v.verdict.word for _, v in rows], color=theme.muted)
    right.spines["right"].set_visible(False)
    right.tick_params(length=0)
    unit = {"difference %": "%", "points": "percentage points"}.get(
        cells.difference_unit(comparison), ""
    )
    name = cells.plain(comparison.baseline, LONGEST_LABEL)
    axes.set_xlabel(
        f"{cells.metric_name(comparison)} less that of {name}" + (f" ({unit})" if unit else "")
    )
    return made


def _difference(
    axes: Axes,
    comparison: Comparison,
    variant: Variant,
    index: int,
    found: Estimate,
    theme: Theme,
) -> None:
    drawn = colour(theme, index)
    for interval, thick in ((found.interval, 1.0), (variant.equivalence, 3.2)):
        if interval is not None:
            ends = [cells.in_difference_units(comparison, end) for end in interval]
            axes.plot(
                ends, [index, index], color=drawn, linewidth=thick, solid_capstyle="butt", zorder=3
            )
    value = cells.in_difference_units(comparison, found.value)
    axes.plot([value], [index], **mark(theme, variant, index), zorder=4)
