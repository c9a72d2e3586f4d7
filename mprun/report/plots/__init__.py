"""A comparison's plots, each as an SVG for the page and as a PNG. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from mprun.compare.rows import Comparison
from mprun.records.run_record import MEMORY_CATEGORIES
from mprun.report import cells, series
from mprun.report.plots import bars, canvas, curves, verdict
from mprun.report.series import Series
from mprun.report.theme import Theme

Lines = Sequence[Sequence[Series]]


class Plot(NamedTuple):
    """A plot, or why there is none."""

    name: str
    title: str
    caption: str
    """What is seen, with n and what bars and bands are; where nothing could be drawn, why."""
    notes: tuple[str, ...] = ()
    """What is missing from it."""
    svg: str = ""
    """An element for a page; empty where nothing could be drawn."""
    png: bytes = b""


def draw(comparison: Comparison, names: Collection[str] | None = None) -> list[Plot]:
    """Plots of a comparison, in the report's order; those that do not apply to it are left out.

    Args:
        comparison: what was found.
        names: of `NAMES`, the ones to draw; None for every one.
    """
    read = series.read(comparison)
    chosen = (make for name, make in _MAKERS.items() if names is None or name in names)
    return [plot for make in chosen if (plot := make(comparison, *read)) is not None]


def _drawn(
    comparison: Comparison, plot: Plot, alt: str, draw_in: Callable[[Theme], Figure]
) -> Plot:
    title = f"{cells.plain(comparison.recipe)}: {alt}"
    svg, png = canvas.render(f"plot-{plot.name}", title, draw_in)
    return plot._replace(svg=svg, png=png)


def _against_time(comparison: Comparison, _lines: Lines, _problems: Sequence[str]) -> Plot:
    name = cells.metric_name(comparison)
    plot = Plot("metric-time", f"{comparison.metric.capitalize()} against time", "")
    shown = verdict.points(comparison)
    if not shown:
        return plot._replace(caption=f"No variant has both a step time and a {name}.")
    margin = cells.difference_text(comparison, comparison.margin, signed=False)
    baseline = cells.plain(comparison.baseline)
    has_interval = any(v.metric and v.metric.interval for v in comparison.variants)
    caption = (
        f"{name.capitalize()} over the time of an optimizer step, {_seeds(comparison)}. "
        "Across: the median, from the tenth to the ninetieth percentile. Upright: the mean"
        f"{' with its 95 % interval' if has_interval else ''}. The grey band is {baseline}'s "
        f"mean plus and minus the margin, {margin}."
    )
    absent = [v for i, v in enumerate(comparison.variants) if i not in {i for i, _ in shown}]
    notes = [
        f"{cells.plain(v.label)} is missing: it has no step time or no metric." for v in absent
    ]
    if any(cells.is_emulated(v) for _, v in shown):
        notes.append("Hollow markers are emulated: their times say nothing of this hardware.")
    return _drawn(
        comparison,
        plot._replace(caption=caption, notes=tuple(notes)),
        f"{name} against time per step",
        lambda theme: verdict.against_time(comparison, theme),
    )


def _differences(comparison: Comparison, _lines: Lines, _problems: Sequence[str]) -> Plot | None:
    if len(comparison.variants) < 2:
        return None
    baseline = cells.plain(comparison.baseline)
    plot = Plot("difference", f"Difference from {baseline}", "")
    if all(v.difference is None for v in comparison.variants[1:]):
        return plot._replace(
            caption="No run of another variant has the seed of one of the baseline's."
        )
    pairs = [v.difference.n for v in comparison.variants[1:] if v.difference]
    caption = (
        f"{cells.metric_name(comparison).capitalize()} less that of {baseline}, paired by "
        f"seed, {_range(pairs, 'pair')}. The grey band is the margin. "
        + (
            "Thin: the 95 % interval. Thick: the 90 % interval. Where several variants are "
            "judged, the table has the wider intervals that decided, after Holm's adjustment."
            if max(pairs) > 1
            else "One pair has no interval."
        )
    )
    return _drawn(
        comparison,
        plot._replace(caption=caption),
        f"paired differences of {comparison.metric} from {baseline}",
        lambda theme: verdict.differences(comparison, theme),
    )


def _losses(comparison: Comparison, lines: Lines, problems: Sequence[str]) -> Plot:
    plot = Plot("loss", "Training loss", "", tuple(f"{x}." for x in problems))
    bands = [curves.loss_band(runs) for runs in lines]
    found = [band for band in bands if band is not None]
    if not found:
        return plot._replace(caption="No run logged a finite loss.")
    most = max(band.width for band in found)
    several = any(len(v.runs) > 1 for v in comparison.variants)
    caption = (
        (
            f"Line: the median over the runs, {_seeds(comparison)}; band: from the lowest to the "
            "highest run. "
            if several
            else "One run of each variant. "
        )
        + (f"A point is the mean of up to {most} steps. " if most > 1 else "Each step is a point. ")
        + (f"Grey: {cells.plain(comparison.baseline)}. " if len(found) > 1 else "")
    )
    if any(curves.validation(runs) for runs in lines):
        caption += "Markers: the median validation loss."
    notes = list(plot.notes)
    for variant, runs, band in zip(comparison.variants, lines, bands, strict=True):
        if broken := series.broken(runs):
            notes.append(
                f"{cells.plain(variant.label)}: {cells.counted(broken, 'run')} logged losses that "
                "are not finite; they are left out."
            )
        if band is None:
            notes.append(f"{cells.plain(variant.label)} is missing: it logged no finite loss.")
    return _drawn(
        comparison,
        plot._replace(caption=caption.strip(), notes=tuple(notes)),
        "training loss of each variant and of the baseline",
        lambda theme: curves.losses(comparison, lines, theme),
    )


def _step_times(comparison: Comparison, lines: Lines, problems: Sequence[str]) -> Plot:
    plot = Plot("step-time", "Time per step", "", tuple(f"{x}." for x in problems))
    times = bars.step_times(lines, comparison.variants)
    if times is None:
        return plot._replace(caption="No run has timed steps beyond its warm-up.")
    counts = [len(row) for row in times.rows]
    caption = (
        f"The timed steps of all runs of a variant, {_range(counts, 'step')}, without warm-up and "
        "partial batches. Outline: how they are distributed (each step a stroke where they are "
        f"fewer than {bars.FEWEST}). Marker and line: the median, and the tenth to ninetieth "
        "percentile, as in the table."
    )
    notes = list(plot.notes)
    if times.outside:
        share = times.outside / max(1, sum(counts))
        notes.append(f"{times.outside} steps ({100 * share:.1f} %) lie beyond the axis.")
    if any(cells.is_emulated(v) for v in comparison.variants):
        notes.append("Hollow: emulated, so its times compare with nothing.")
    return _drawn(
        comparison,
        plot._replace(caption=caption, notes=tuple(notes)),
        "distribution of step times of each variant",
        lambda theme: bars.distributions(comparison, times, theme),
    )


def _memory(comparison: Comparison, _lines: Lines, _problems: Sequence[str]) -> Plot:
    plot = Plot("memory", "Memory of a step", "")
    if not any(v.memory_bytes.get(name) for v in comparison.variants for name in MEMORY_CATEGORIES):
        return plot._replace(caption="The memory of a step is not known for any run.")
    caption = (
        "What is alive at the peak of a training step, counted from the tensors of a step on fake "
        "tensors: the same for every seed, and for emulated variants that of the mode, not of its "
        "emulation. Blue: what lives as long as the model; brown: what a step makes and drops."
    )
    return _drawn(
        comparison,
        plot._replace(caption=caption),
        "peak memory of a training step by category",
        lambda theme: bars.memory(comparison, theme),
    )


def _loss_scales(comparison: Comparison, lines: Lines, _problems: Sequence[str]) -> Plot | None:
    scaling = curves.scaling(comparison, lines)
    if not scaling:
        return None
    plot = Plot("loss-scale", "Loss scale", "")
    constant = curves.constant_scale([one for i in scaling for one in lines[i]])
    skipped = sum(int(np.sum(one.steps.skipped)) for i in scaling for one in lines[i])
    if constant is not None and not skipped:
        names = ", ".join(cells.plain(comparison.variants[i].label) for i in scaling)
        return plot._replace(
            caption=f"It stayed at {constant:g} from the first step to the last in every run of "
            f"{names}, and no step was skipped."
        )
    caption = (
        f"A line for each run of the variants that scale their loss, {_seeds(comparison)}. "
        f"Crosses: skipped steps ({skipped} in all)."
    )
    return _drawn(
        comparison,
        plot._replace(caption=caption),
        "history of the loss scale",
        lambda theme: curves.loss_scales(comparison, lines, theme),
    )


def _seeds(comparison: Comparison) -> str:
    return _range([len(v.runs) for v in comparison.variants], "seed")


def _range(counts: Sequence[int], what: str) -> str:
    """`n = 3 seeds`, or `n = 2 to 5 seeds` where they differ."""
    low, high = min(counts, default=0), max(counts, default=0)
    return f"n = {f'{low} to ' if low < high else ''}{cells.counted(high, what)}"


_MAKERS: dict[str, Callable[[Comparison, Lines, Sequence[str]], Plot | None]] = {
    "metric-time": _against_time,
    "difference": _differences,
    "loss": _losses,
    "step-time": _step_times,
    "memory": _memory,
    "loss-scale": _loss_scales,
}
NAMES = tuple(_MAKERS)
"""Every plot there may be, in the report's order."""
