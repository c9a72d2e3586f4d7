"""The plot of trainings: the losses of each variant over the steps, from the runs' metrics.jsonl.

A long curve is cut into bins of equally many steps, and a point is the mean of its bin. This both
smooths and thins the curve, without a shift of its level. The band over seeds reaches from the
lowest to the highest run. It is no confidence interval: three seeds are too few for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mprun.errors import UsageError
from mprun.records.console.formatting import counted
from mprun.records.reader import LARGEST
from mprun.records.run_record import Summary, read_lines
from mprun.study.compare.comparison import Comparison, Run
from mprun.study.report import cells
from mprun.study.report.plots.canvas import Plot, name_panel, panels, seeds, spread_axis
from mprun.study.report.theme import LIGHT, colour, marker

Column = NDArray[np.float64]
Curve = tuple[Column, Column]  # Steps, and the loss at each; NaN where a line of the log lacks one

LOSSES_FACTOR = 20.0  # Losses farther apart than this are drawn on a logarithmic axis

MAX_POINTS = 150  # Points of a curve

MAX_MARKS = 25  # The most validation losses drawn of a variant; of more, every second, third, ..


# ---- data ----------------------------------------------------------------------------------------


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

    runs: list[RunLosses]
    band: Band | None
    validation: Curve | None  # The medians over runs
    x_unit: float  # A step on the axis: 1, or its share of an epoch


def read(runs: Sequence[Run]) -> tuple[list[RunLosses], list[str]]:
    """The losses of runs, and a sentence for each run whose log cannot be read."""
    read_losses, problems = [], []
    for run in runs:
        try:
            lines = read_lines(run.path)
        except UsageError as error:
            reason = str(error).replace(f"{run.path}/", "", 1)
            problems.append(f"seed {run.summary.seed}: {cells.plain(reason, 120)}.")
        else:
            read_losses.append(RunLosses(_curve(lines, "step"), _curve(lines, "validation")))
    return read_losses, problems


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
    """Median, lowest and highest over curves, in at most `points` bins.

    Values that are not finite are left out. The result is None if nothing is left.
    """
    clean = [(x[ok], y[ok]) for x, y in curves if (ok := _usable(x, y)).any()]
    if not clean:
        return None
    last = max(x.max() for x, _ in clean)
    width = max(1, math.ceil(last / points))
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
    # From 2**53 on a float does not tell one step from the next.
    return np.isfinite(x) & np.isfinite(y) & (x >= 0) & (x < 2**53)


def _means(x: Column, y: Column, width: int, bins: int) -> Column:
    """The mean of y in each bin of x; NaN in an empty one. Steps 1..width are the first bin."""
    place = np.clip((x - 1) // width, 0, bins - 1).astype(np.int64)
    count = np.bincount(place, minlength=bins)
    with np.errstate(over="ignore"):
        total = np.bincount(place, weights=y, minlength=bins)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _validation(runs: Sequence[RunLosses]) -> Curve | None:
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


def _epoch_share(summary: Summary) -> float:
    """A step as a share of an epoch."""
    samples = summary.data.train_samples
    if samples is None:  # a stream
        return 1 / max(1, round(summary.steps / max(1, summary.epochs or 1)))
    return 1 / max(1, math.ceil(samples / max(1, summary.batch_size)))


# ---- drawing -------------------------------------------------------------------------------------


def losses(comparison: Comparison) -> Plot:
    """The training losses of each variant, with the baseline's behind them."""
    batches = {run.summary.batch_size for v in comparison.variants for run in v.runs}
    in_epochs = len(batches) > 1  # steps of different batch sizes cannot be compared
    rows: list[VariantLosses] = []
    notes: list[str] = []
    for variant in comparison.variants:
        name = cells.plain(variant.label)
        runs, problems = read(variant.runs)
        x_unit = _epoch_share(variant.runs[0].summary) if in_epochs and variant.runs else 1.0
        own = band([one.training for one in runs])
        rows.append(VariantLosses(runs, own, _validation(runs), x_unit))
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
    others = [i for i in range(1, len(rows)) if rows[i].band] or [0]
    made, axes_of = panels(len(others))
    for index, axes in zip(others, axes_of, strict=True):
        for i in dict.fromkeys((0, index)):
            is_behind = i == 0 and len(rows) > 1
            _draw_losses(axes, rows[i], i, LIGHT.muted if is_behind else colour(i))
        name_panel(axes, comparison.variants[index], index)
        axes.grid(axis="y")
    bands = [one.band for one in rows if one.band]
    ends = [float(end) for b in bands for end in (b.low.min(), b.high.max())]
    spread_axis(axes_of[0], "y", ends, LOSSES_FACTOR)
    made.supylabel("training loss", fontsize=8.5, color=LIGHT.muted)
    made.supxlabel(x_name, fontsize=8.5, color=LIGHT.muted)
    return made


def _draw_losses(axes: Axes, one: VariantLosses, index: int, drawn: str) -> None:
    if one.band is None:
        return
    x = one.band.x * one.x_unit
    axes.fill_between(x, one.band.low, one.band.high, color=drawn, alpha=0.22, linewidth=0)
    axes.plot(x, one.band.middle, color=drawn, linewidth=1.2)
    if one.validation is not None:
        axes.plot(
            one.validation[0] * one.x_unit,
            one.validation[1],
            linestyle="none",
            marker=marker(index),
            markersize=3.6,
            markerfacecolor=LIGHT.paper,
            markeredgecolor=drawn,
            markeredgewidth=0.9,
        )
