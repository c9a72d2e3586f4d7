"""The plots of a comparison, each as an SVG for the page and as a PNG. No torch.

The metric against time, differences against the margin at the end and at each look of a study, and
the training losses of each variant over the steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from mprun.errors import UsageError
from mprun.records.console.formatting import counted
from mprun.records.reader import LARGEST
from mprun.records.run_record import Summary, read_lines
from mprun.study.compare.comparison import Comparison, Run, Variant
from mprun.study.report import cells
from mprun.study.report.canvas import LIGHT, Plot, colour, figure, marker, panels, spread_axis

MAX_LABEL = 30
MAX_LEGEND_LABEL = 20  # Two names stand side by side in a legend

# ---- the plots behind the verdicts ---------------------------------------------------------------

# Times are drawn on a logarithmic axis if the largest is more than this factor above the least
TIMES_FACTOR = 8.0


def against_time(comparison: Comparison) -> Plot:
    """The metric of each variant over the time of a step."""
    name = cells.metric_name(comparison)
    plot = Plot("metric-time", f"{comparison.metric.capitalize()} against time", "")
    drawn = {
        index: variant
        for index, variant in enumerate(comparison.variants)
        if variant.step_time_ms and variant.metric and math.isfinite(variant.metric.value)
    }
    if not drawn:
        return plot._replace(caption=f"No variant has both a step time and a {name}.")
    margin = cells.difference_text(comparison, comparison.margin, signed=False)
    has_interval = any(v.metric and v.metric.interval for v in comparison.variants)
    caption = (
        f"{name.capitalize()} over the time of an optimizer step, {seeds(comparison)}. Marker: the "
        "mean and the median time. Horizontal line: the tenth to the ninetieth percentile. "
        f"{'Vertical line: the 95 % interval. ' if has_interval else ''}The grey band is "
        f"{cells.plain(comparison.baseline)}'s mean plus and minus the margin, {margin}."
    )
    notes = [
        f"{cells.plain(v.label)} is missing: it has no step time or no metric."
        for i, v in enumerate(comparison.variants)
        if i not in drawn
    ]
    if any(map(cells.is_emulated, drawn.values())):
        notes.append("Hollow markers are emulated: their times are not comparable.")
    return plot._replace(caption=caption, notes=tuple(notes)).drawn(
        f"{cells.plain(comparison.recipe)}: {name} against time per step",
        lambda: _draw_against_time(comparison, drawn),
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


def _draw_against_time(comparison: Comparison, variants: dict[int, Variant]) -> Figure:
    made = figure(4.3)
    axes: Axes = made.subplots()
    scale = cells.metric_scale(comparison)
    times_ms = []
    for index, variant in variants.items():
        step, metric = variant.step_time_ms, variant.metric
        assert step is not None
        assert metric is not None
        line: dict[str, Any] = {"color": colour(index), "linewidth": 0.9, "zorder": 3.0}
        x, y = step.median, scale * metric.value
        axes.plot([step.p10, step.p90], [y, y], **line)
        if metric.interval is not None:
            axes.plot([x, x], [scale * end for end in metric.interval], **line)
        axes.plot([x], [y], **mark(variant, index), zorder=4)
        times_ms.append(x)
    _draw_margin(axes, comparison)
    unit = cells.metric_unit(comparison)
    axes.set_ylabel(cells.axis_name(comparison) + (f" ({unit})" if unit else ""))
    spread_axis(axes, "x", times_ms, TIMES_FACTOR)
    axes.set_xlabel("time per step (ms)")
    axes.grid(axis="y")
    axes.margins(x=0.16, y=0.14)  # markers at the edge would be cut off
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
    axes.axhspan(low, high, color=LIGHT["wash"], linewidth=0, zorder=0)


def _draw_differences(comparison: Comparison) -> Figure:
    rows = list(enumerate(comparison.variants))[1:]
    made = figure(0.75 + 0.42 * len(rows))
    axes: Axes = made.subplots()
    scale = cells.DIFFERENCE_SCALE
    margin = comparison.margin * scale
    axes.axvspan(-margin, margin, color=LIGHT["wash"], linewidth=0, zorder=0)
    axes.axvline(0, color=LIGHT["muted"], linewidth=0.8, zorder=1)
    for index, variant in rows:
        difference = variant.difference
        if difference is None or not math.isfinite(difference.value):
            continue
        line: dict[str, Any] = {"color": colour(index), "solid_capstyle": "butt", "zorder": 3}
        # Thin: 95 %, for a difference from 0. Thick: 90 %, for equivalence within the margin.
        for interval, width in ((difference.interval, 1.0), (variant.equivalence, 3.2)):
            if interval is not None:
                ends = [end * scale for end in interval]
                axes.plot(ends, [index, index], linewidth=width, **line)
        axes.plot([difference.value * scale], [index], **mark(variant, index), zorder=4)
    # Each row has its name above: a phone has no room beside it
    axes.set_yticks([])
    for index, variant in rows:
        emulated = " (emulated)" if cells.is_emulated(variant) else ""
        text = f"{cells.plain(variant.label, MAX_LABEL)}{emulated}: {variant.verdict.word}"
        axes.text(0, index - 0.2, text, transform=axes.get_yaxis_transform(), va="bottom")
    axes.set_ylim(len(rows) + 0.6, 0.4)  # downwards, as the rows of the table
    axes.spines["left"].set_visible(False)
    name = cells.plain(comparison.baseline, MAX_LABEL)
    axes.set_xlabel(
        f"{cells.axis_name(comparison)} minus that of {name}\n"
        f"({'%' if comparison.is_relative else 'percentage points'})"
    )
    return made


MARGINS_SHOWN = 4.0  # The first looks of noisy modes have intervals of many margins


def looks(comparison: Comparison) -> Plot | None:
    """The interval of each variant at each look, against the margin; None without looks."""
    drawn = [(i, v) for i, v in enumerate(comparison.variants) if v.looks]
    if not drawn:
        return None
    margin = cells.difference_text(comparison, comparison.margin, signed=False)
    plot = Plot(
        "looks",
        "Looks",
        f"{cells.metric_name(comparison).capitalize()} minus that of "
        f"{cells.plain(comparison.baseline)} after each look of the study: the interval at the "
        f"level of the look, {counts([x.pairs for _, v in drawn for x in v.looks], 'seed')}. The "
        f"grey band is the margin, {margin}. A mode that is settled has no later look. Intervals "
        f"are cut off at {MARGINS_SHOWN:.0f} margins.",
    )
    return plot.drawn(
        f"{cells.plain(comparison.recipe)}: intervals of the difference look by look",
        lambda: _draw_looks(comparison, drawn),
    )


def _draw_looks(comparison: Comparison, variants: Sequence[tuple[int, Variant]]) -> Figure:
    made, axes_of = panels(len(variants))
    scale = cells.DIFFERENCE_SCALE
    margin = comparison.margin * scale
    for (index, variant), axes in zip(variants, axes_of, strict=True):
        axes.axhspan(-margin, margin, color=LIGHT["wash"], linewidth=0, zorder=0)
        axes.axhline(0, color=LIGHT["muted"], linewidth=0.8, zorder=1)
        for look in variant.looks:
            place = comparison.planned_pairs.index(look.pairs)
            if look.interval is not None and look.difference is not None:
                ends = [end * scale for end in look.interval]
                axes.plot([place, place], ends, color=colour(index), linewidth=1.2, zorder=3)
                axes.plot([place], [look.difference * scale], **mark(variant, index, 5), zorder=4)
        heading = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0.2}
        name_variants(axes, {index: variant}, borderaxespad=0, **heading)
        axes.set_xticks(range(len(comparison.planned_pairs)), map(str, comparison.planned_pairs))
    axes_of[0].set_ylim(-MARGINS_SHOWN * margin, MARGINS_SHOWN * margin)
    axes_of[0].set_xlim(-0.5, len(comparison.planned_pairs) - 0.5)
    unit = "%" if comparison.is_relative else "percentage points"
    made.supylabel(f"difference ({unit})", fontsize=8.5, color=LIGHT["muted"])
    made.supxlabel("seeds", fontsize=8.5, color=LIGHT["muted"])
    return made


# ---- training losses ----------------------------------------------------------------------------

Column = NDArray[np.float64]
Curve = tuple[Column, Column]  # Steps, and the loss at each; NaN where a line of the log lacks one

LOSSES_FACTOR = 20.0  # Losses farther apart than this are drawn on a logarithmic axis

# Points of a curve, in a panel that a phone shows in a few hundred pixels. A point is the mean of a
# bin, which smooths and thins the curve without a shift of its level.
MAX_POINTS = 150

MAX_MARKS = 25  # The most validation losses drawn of a variant


class RunLosses(NamedTuple):
    """The losses in the log of one run."""

    training: Curve
    validation: Curve


class Band(NamedTuple):
    """A curve over runs: their median, lowest and highest at each place."""

    x: Column
    middle: Column
    low: Column
    high: Column
    width: int  # Steps in one point


class VariantLosses(NamedTuple):
    """What is drawn of a variant."""

    band: Band | None
    validation: Band | None  # Its medians are drawn
    x_unit: float  # A step on the axis: 1, or its share of an epoch


def read_losses(runs: Sequence[Run]) -> tuple[list[RunLosses], list[str]]:
    """The losses of runs, and a sentence for each run whose log cannot be read."""
    runs_losses, problems = [], []
    for run in runs:
        try:
            lines = read_lines(run.path)
        except UsageError as error:
            reason = str(error).replace(f"{run.path}/", "", 1)
            problems.append(f"seed {run.summary.seed}: {cells.plain(reason, 120)}.")
        else:
            runs_losses.append(RunLosses(_curve(lines, "step"), _curve(lines, "validation")))
    return runs_losses, problems


def _curve(lines: Sequence[dict[str, Any]], kind: str) -> Curve:
    chosen = [line for line in lines if line.get("kind") == kind]
    steps, values = ([_number(line.get(key)) for line in chosen] for key in ("step", "loss"))
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # someone else may have written the log
        return math.nan
    return math.copysign(math.inf, number) if abs(number) > LARGEST else number


def band(curves: Sequence[Curve], points: int = MAX_POINTS) -> Band | None:
    """Median, lowest and highest over curves, of finite values, in at most `points` bins."""
    clean = [(x[ok], y[ok]) for x, y in curves if (ok := _usable(x, y)).any()]
    if not clean:
        return None
    last = max(x.max() for x, _ in clean)
    width = max(1, math.ceil(last / points))  # steps of a bin, the same for all runs
    bins = int(last // width) + 1
    rows = np.array([_means(x, y, width, bins) for x, y in clean])
    places = np.array([_means(x, x, width, bins) for x, _ in clean])
    filled = ~np.isnan(rows).all(axis=0)
    rows, places = rows[:, filled], places[:, filled]
    return Band(
        np.nanmean(places, axis=0),
        np.nanmedian(rows, axis=0),
        np.nanmin(rows, axis=0),
        np.nanmax(rows, axis=0),
        width,
    )


def _usable(x: Column, y: Column) -> NDArray[np.bool_]:
    # From 2**53 on a float does not tell one step from the next: such a log is damaged
    return np.isfinite(x) & np.isfinite(y) & (x >= 0) & (x < 2**53)


def _means(x: Column, y: Column, width: int, bins: int) -> Column:
    """The mean of y in each bin of x; NaN in an empty one. Steps 1..width are the first bin."""
    place = np.clip((x - 1) // width, 0, bins - 1).astype(np.int64)
    count = np.bincount(place, minlength=bins)
    with np.errstate(over="ignore"):  # losses up to 1e100 may add up to infinity
        total = np.bincount(place, weights=y, minlength=bins)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _epoch_share(summary: Summary) -> float:
    """A step as a share of an epoch."""
    samples = summary.data.train_samples
    if samples is None:  # a stream
        return 1 / max(1, round(summary.steps / max(1, summary.epochs or 1)))
    return 1 / max(1, math.ceil(samples / max(1, summary.batch_size)))


def losses(comparison: Comparison) -> Plot:
    """The training losses of each variant, with the baseline's behind them."""
    batches = {run.summary.batch_size for v in comparison.variants for run in v.runs}
    in_epochs = len(batches) > 1  # steps of different batch sizes cannot be compared
    rows: list[VariantLosses] = []
    notes: list[str] = []
    for variant in comparison.variants:
        name = cells.plain(variant.label)
        runs, problems = read_losses(variant.runs)
        x_unit = _epoch_share(variant.runs[0].summary) if in_epochs and variant.runs else 1.0
        own = band([one.training for one in runs])
        rows.append(VariantLosses(own, band([one.validation for one in runs], MAX_MARKS), x_unit))
        notes += [f"{name}, {problem}" for problem in problems]
        if broken := sum(not np.isfinite(one.training[1]).all() for one in runs):
            left_out = "logged losses that are not finite; they are left out."
            notes.append(f"{name}: {counted(broken)} {left_out}")
        if own is None:
            notes.append(f"{name} is missing: it logged no finite loss.")
    plot = Plot("loss", "Training loss", "", tuple(notes))
    if not any(one.band for one in rows):
        return plot._replace(caption="No run logged a finite loss.")
    return plot._replace(caption=_caption(comparison, rows)).drawn(
        f"{cells.plain(comparison.recipe)}: training loss of each variant and of the baseline",
        lambda: _draw(comparison, rows, "epoch" if in_epochs else "optimizer step"),
    )


def _caption(comparison: Comparison, rows: Sequence[VariantLosses]) -> str:
    drawn = [one.band for one in rows if one.band]
    most = max(one.width for one in drawn)
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
    if any(one.validation for one in rows):
        sentences.append("Markers: the median validation loss.")
    return " ".join(sentences)


def _draw(comparison: Comparison, rows: Sequence[VariantLosses], x_name: str) -> Figure:
    others = [i for i in range(1, len(rows)) if rows[i].band] or [0]  # the baseline alone
    made, axes_of = panels(len(others))
    for index, axes in zip(others, axes_of, strict=True):
        for i in dict.fromkeys((0, index)):
            is_behind = i == 0 and len(rows) > 1
            _draw_losses(axes, rows[i], i, LIGHT["muted"] if is_behind else colour(i))
        heading = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0.2}
        name_variants(axes, {index: comparison.variants[index]}, borderaxespad=0, **heading)
        axes.grid(axis="y")
    bands = [one.band for one in rows if one.band]
    ends = [float(end) for b in bands for end in (b.low.min(), b.high.max())]
    spread_axis(axes_of[0], "y", ends, LOSSES_FACTOR)
    made.supylabel("training loss", fontsize=8.5, color=LIGHT["muted"])
    made.supxlabel(x_name, fontsize=8.5, color=LIGHT["muted"])
    return made


def _draw_losses(axes: Axes, one: VariantLosses, index: int, drawn: str) -> None:
    if one.band is None:
        return
    x = one.band.x * one.x_unit
    # From the lowest to the highest run, no confidence interval: three seeds are too few for one
    axes.fill_between(x, one.band.low, one.band.high, color=drawn, alpha=0.22, linewidth=0)
    axes.plot(x, one.band.middle, color=drawn, linewidth=1.2)
    if one.validation is not None:
        axes.plot(
            one.validation.x * one.x_unit,
            one.validation.middle,
            linestyle="none",
            marker=marker(index),
            markersize=3.6,
            markerfacecolor=LIGHT["paper"],
            markeredgecolor=drawn,
            markeredgewidth=0.9,
        )


# ---- variants in a drawing ---------------------------------------------------------------------


def seeds(comparison: Comparison) -> str:
    """`n = 3 seeds`: the runs of the variants."""
    return counts([len(v.runs) for v in comparison.variants], "seed")


def counts(numbers: Sequence[int], thing: str) -> str:
    """`n = 3 seeds`, or `n = 2 to 5 seeds` if they differ."""
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"n = {f'{low} to ' if low < high else ''}{counted(high, thing)}"


def mark(variant: Variant, index: int, size: float = 6.5) -> dict[str, Any]:
    """matplotlib's keywords for a variant's marker without a line; hollow for an emulated one."""
    return {
        "linestyle": "none",
        "marker": marker(index),
        "markersize": size,
        "markeredgecolor": colour(index),
        "markerfacecolor": LIGHT["paper"] if cells.is_emulated(variant) else colour(index),
        "markeredgewidth": 1.1,
    }


def name_variants(owner: Axes | Figure, variants: dict[int, Variant], **where: Any) -> None:
    """A legend with the marker and the name of each variant, by its row in the table."""
    keys = [Line2D([], [], **mark(v, i, 5.0), label="name") for i, v in variants.items()]
    legend = owner.legend(handles=keys, **where)
    for text, variant in zip(legend.get_texts(), variants.values(), strict=True):
        # a handle's label may not begin with "_"
        text.set_text(cells.plain(variant.label, MAX_LEGEND_LABEL))


# ---- all plots -----------------------------------------------------------------------------------

PLOTS = {"metric-time": against_time, "difference": differences, "looks": looks, "loss": losses}
NAMES = tuple(PLOTS)  # Every plot there may be, in the report's order


def draw(comparison: Comparison, names: Collection[str] = NAMES) -> list[Plot]:
    """Those plots of `names` that apply to the comparison, in the report's order."""
    plots = (make(comparison) for name, make in PLOTS.items() if name in names)
    return [plot for plot in plots if plot is not None]
