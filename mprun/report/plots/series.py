"""The data of the plots: the steps in the runs' metrics.jsonl, as columns, thinned, over seeds.

A long curve is cut into bins of equally many steps, and a point is the mean of its bin. This both
smooths and thins the curve, without a shift of its level. The band over seeds reaches from the
lowest to the highest run. It is no confidence interval: three seeds are too few for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mprun.compare.comparison import Comparison, Run
from mprun.errors import UsageError
from mprun.records.reader import LARGEST
from mprun.records.run_record import Summary, read_lines
from mprun.report.cells import plain

Column = NDArray[np.float64]

MAX_POINTS = 150
"""Points of a curve."""


class StepColumns(NamedTuple):
    """A run's logged steps as columns of equal length; NaN if a line lacks a field."""

    step: Column
    loss: Column
    time_ms: Column
    scale: Column
    skipped: NDArray[np.bool_]


class RunSeries(NamedTuple):
    """The log of one run."""

    run: Run
    steps: StepColumns
    validation: tuple[Column, Column]
    """Steps, and the validation loss after them."""


class Logs(NamedTuple):
    """The logs of the runs of a comparison."""

    series: list[list[RunSeries]]
    """The runs of each variant."""
    notes: tuple[str, ...]
    """A sentence for each run whose log cannot be read."""


class Band(NamedTuple):
    """A curve over runs: their median, lowest and highest at each place."""

    x: Column
    middle: Column
    low: Column
    high: Column
    width: int
    """Steps in one point."""


def read(comparison: Comparison) -> Logs:
    """Read the logs of all runs."""
    series: list[list[RunSeries]] = []
    notes: list[str] = []
    for variant in comparison.variants:
        series.append([])
        for run in variant.runs:
            name = f"{plain(variant.label)}, seed {run.summary.seed}"
            try:
                series[-1].append(_series(run, read_lines(run.path)))
            except UsageError as error:
                reason = str(error).replace(f"{run.path}/", "", 1)
                notes.append(f"{name}: {plain(reason, 120)}.")
    return Logs(series, tuple(notes))


def _series(run: Run, lines: Sequence[dict[str, Any]]) -> RunSeries:
    steps = [line for line in lines if line.get("kind") == "step"]
    validation = [line for line in lines if line.get("kind") == "validation"]
    return RunSeries(
        run,
        StepColumns(
            step=_column(steps, "step"),
            loss=_column(steps, "loss"),
            time_ms=_column(steps, "step_time_ms"),
            scale=_column(steps, "loss_scale"),
            skipped=np.array([line.get("skipped") is True for line in steps], dtype=bool),
        ),
        (_column(validation, "step"), _column(validation, "loss")),
    )


def _column(lines: Iterable[dict[str, Any]], key: str) -> Column:
    return np.array([_number(line.get(key)) for line in lines], dtype=np.float64)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return math.copysign(math.inf, number) if abs(number) > LARGEST else number


def timed(series: RunSeries) -> Column:
    """Milliseconds of the steps that enter the statistics: full batches after the warm-up.

    The log does not mark them. They follow from the summary: an epoch's last batch is partial if
    the batch size does not divide the samples, and the first timed steps are warm-up.
    """
    step, time_ms = series.steps.step, series.steps.time_ms
    per_epoch, rest = _epoch(series.run.summary)
    warmup = series.run.summary.step_time_ms.warmup
    partial = np.floor(step / per_epoch) if rest else np.zeros_like(step)
    full = (step % per_epoch != 0) if rest else np.ones_like(step, dtype=bool)
    return time_ms[full & (step - partial > warmup) & np.isfinite(time_ms)]


def _epoch(summary: Summary) -> tuple[int, int]:
    """Steps of an epoch, and the samples of its last, partial batch (0 if there is none)."""
    samples, batch = summary.data.train_samples, max(1, summary.batch_size)
    if samples is None:  # a stream
        return max(1, round(summary.steps / max(1, summary.epochs or 1))), 0
    return max(1, math.ceil(samples / batch)), samples % batch


def epochs_per_step(summary: Summary) -> float:
    """A step as a share of an epoch: for curves of different batch sizes on one axis."""
    return 1 / _epoch(summary)[0]


def band(curves: Sequence[tuple[Column, Column]], points: int = MAX_POINTS) -> Band | None:
    """Median, lowest and highest over curves (steps, values), in at most `points` bins.

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
    return np.isfinite(x) & np.isfinite(y) & (x >= 0) & (x < 2**53)


def _means(x: Column, y: Column, width: int, bins: int) -> Column:
    """The mean of y in each bin of x; NaN in an empty one. Steps 1..width are the first bin."""
    place = np.clip((x - 1) // width, 0, bins - 1).astype(np.int64)
    count = np.bincount(place, minlength=bins)
    with np.errstate(over="ignore"):
        total = np.bincount(place, weights=y, minlength=bins)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
