"""The plots of measurements: a step's memory over its ops, exponents by layer.

A model of hundreds of layers gives a picture that nobody scrolls through. Of each kind the layers
that float16 changes most are drawn, in the order of the model; `numerics.json` has all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mprun.inspect.memory import NAMES, MemoryRecord, ModeMemory
from mprun.inspect.numerics import KINDS, LONG, NumericsResult, NumericsRow, fp16_db, number
from mprun.records.console.formatting import UNITS, change_text, shortened, size_text, unit_for
from mprun.records.run_record import MEMORY_CATEGORIES
from mprun.study.report.canvas import LIGHT, MEMORY, colour, figure, legend_above, picture_files

# Phases with a shaded background, to separate them from the others
SHADED = ("forward", "optimizer")
# The most ops drawn in a panel and in all: of each stretch of ops the one with the largest sum
POINTS, ALL_POINTS = 2000, 8000
HEADROOM = 1.5  # The axis over the highest peak, for its label and the phases' names


def memory_plot(record: MemoryRecord) -> dict[str, bytes]:
    """`memory.png` and `memory.svg`: name to content."""
    modes = ", ".join(mode.label for mode in record.modes)
    counted = [mode for mode in record.modes if mode.same_as is None]
    alike = Counter(mode.same_as for mode in record.modes)
    title = f"Memory during one training step of {record.recipe} on {record.device}: {modes}"
    caption = (
        "Bytes alive after each op of the step, by category, counted on fake tensors. Triangle: "
        "the peak, with the op and the module that reach it. A change in per cent is that of the "
        f"peak against {record.against}. Blue: tensors that live as long as the model. Brown: "
        "those that a step makes and frees."
    )
    return picture_files("memory", title, caption, lambda: _draw(counted, alike))


def _draw(modes: Sequence[ModeMemory], alike: Mapping[str | None, int]) -> Figure:
    """A panel for each mode that was counted; `alike` has how many others share its count."""
    made = figure((2.6 if len(modes) < 3 else 1.9) * len(modes) + 0.5)
    axes_of = list(made.subplots(len(modes), 1, sharey=True, squeeze=False)[:, 0])
    highest = max(mode.bytes["peak"] for mode in modes)
    unit = unit_for(highest)
    for axes, mode in zip(axes_of, modes, strict=True):
        _draw_timeline(axes, mode, UNITS[unit], min(POINTS, ALL_POINTS // len(modes)))
        _draw_phases(axes, mode.timeline.phase, highest / UNITS[unit])
        change = "" if mode is modes[0] or mode.ratio is None else f": {change_text(mode.ratio)}"
        others = f" and {alike[mode.label]} more" if alike[mode.label] else ""
        axes.set_title(f"{mode.label}{others}{change}", loc="left")
        axes.set_xlim(0, max(len(mode.timeline.op) - 1, 1))
        axes.set_ylim(0, highest / UNITS[unit] * HEADROOM)
    axes_of[-1].set_xlabel("op of the step")
    made.supylabel(f"{unit} alive", fontsize=8.5, color=LIGHT["muted"])
    legend_above(made, axes_of[0])
    return made


def _draw_timeline(axes: Axes, mode: ModeMemory, unit: int, points: int) -> None:
    rows = [getattr(mode.timeline, category) for category in MEMORY_CATEGORIES]
    shown = thinned(rows, points)
    axes.stackplot(
        shown,
        [[row[i] / unit for i in shown] for row in rows],
        labels=[NAMES[category][0] for category in MEMORY_CATEGORIES],
        colors=MEMORY,
        step="mid" if len(shown) < points else None,
        lw=0,
    )
    at, peak = mode.peak_at, mode.bytes["peak"]
    axes.plot(at.point, peak / unit, marker="v", color=LIGHT["ink"], ms=6, clip_on=False)
    is_right = at.point > len(mode.timeline.op) / 2
    axes.annotate(
        f"{size_text(peak)}\n{at.op}, {at.module or '(root)'}",
        (at.point, peak / unit),
        xytext=(-6 if is_right else 6, 5),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="bottom",
    )


def _draw_phases(axes: Axes, phases: Sequence[str], highest: float) -> None:
    """Shade the stretches of the phases, and name the longest of each phase."""
    longest: dict[str, tuple[int, int]] = {}
    for phase, start, stop in stretches(phases):
        if phase in SHADED:
            axes.axvspan(start - 0.5, stop - 0.5, color=LIGHT["wash"], lw=0, zorder=0)
        before = longest.get(phase, (0, 0))
        longest[phase] = max(before, (start, stop), key=lambda s: s[1] - s[0])
    for phase, (start, stop) in longest.items():
        if phase != "other":  # the loss and the clipping: stretches of a few ops
            is_wide = (stop - start) * 8 > len(phases)
            axes.text(
                (start + stop - 1) / 2,
                highest * (HEADROOM - 0.03),
                phase,
                color=LIGHT["muted"],
                ha="center",
                va="top",
                rotation=0 if is_wide else 90,
            )


def stretches(phases: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Each stretch of equal phases: phase, its first op, the op after its last."""
    for phase, group in groupby(range(len(phases)), key=phases.__getitem__):
        numbers = list(group)
        yield phase, numbers[0], numbers[-1] + 1


def thinned(rows: Sequence[Sequence[int]], points: int) -> list[int]:
    """At most `points` ops: of each stretch of ops the one with the largest sum over `rows`."""
    totals = [sum(column) for column in zip(*rows, strict=True)]
    width = -(-len(totals) // points)  # rounded up
    starts = range(0, len(totals), width)
    return [max(range(s, min(s + width, len(totals))), key=totals.__getitem__) for s in starts]


# The exponents of a format's smallest number, its smallest normal one, and its overflow
LIMITS = {"fp16": (-24, -14, 16), "bf16": (-133, -126, 128)}
LEAST = 1e-6  # Smaller shares are not drawn: the lower end of the colours
MAX_ROWS = 12  # The most layers drawn of a kind: nobody scrolls through hundreds
MAX_NAME = 20  # Characters of a layer's name; of a longer one the middle is left out
ROW_IN = 0.15  # Height of a row, in inches: room for its name at 7 points


def numerics_plot(result: NumericsResult, title: str) -> dict[str, bytes]:
    """`numerics.png` and `numerics.svg`: name to content."""
    heading = f"Sizes of the numbers of {title}"
    return picture_files("numerics", heading, _caption(result), lambda: exponents(result))


def exponents(result: NumericsResult) -> Figure:
    """A panel for each kind: a row for each layer, a column for each power of two."""
    panels = [(kind, worst(rows)) for kind in KINDS if (rows := _rows(result, kind))]
    if not panels:  # only zeros
        return figure(1)
    drawn = [e for _, rows in panels for row in rows for e, _ in _shares(row)]
    # float16's numbers end at 2^-24, half of which rounds to 0, and overflow at 2^16
    low, high = min([*drawn, -25]) - 1, max([*drawn, 16]) + 1
    heights = [len(rows) for _, rows in panels]
    made = figure(1.5 + 0.3 * len(panels) + ROW_IN * sum(heights))
    axes = made.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for panel, (kind, rows) in zip(axes, panels, strict=True):
        image = _draw_shares(panel, rows, low, high)
        scale = result.loss_scale.recommended if "gradients" in kind else None
        _draw_limits(panel, low, high, scale)
        count = len(_rows(result, kind))
        of_all = f": the {len(rows)} of {count} that float16 changes most"
        title = f"{KINDS[kind][1]}{of_all if len(rows) < count else ''}"
        panel.set_title(title, loc="left")
    lines = {line.get_label(): line for panel in axes for line in panel.lines}
    made.legend(lines.values(), lines, loc="outside upper left", ncols=2, fontsize=8)
    bar = made.colorbar(image, ax=list(axes), location="bottom", aspect=40, pad=0.01)
    bar.ax.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
    bar.set_label("share of the row's non-zero values (%)")
    axes[-1].set_xlabel("exponent e: values of magnitude 2^e up to 2^(e+1)")
    return made


def _rows(result: NumericsResult, kind: str) -> list[NumericsRow]:
    return [row for row in result.rows if row.kind == kind and row.histogram.exponents]


def worst(rows: Sequence[NumericsRow]) -> list[NumericsRow]:
    """The rows that float16 changes most, in the order they had."""
    by_db = sorted(range(len(rows)), key=lambda n: fp16_db(rows[n]))
    return [rows[n] for n in sorted(by_db[:MAX_ROWS])]


def _shares(row: NumericsRow) -> Iterator[tuple[int, float]]:
    """Exponents with their share of the row's non-zero values."""
    shares = ((e, n / row.histogram.nonzero) for e, n in row.histogram.exponents.items())
    return ((exponent, share) for exponent, share in shares if share >= LEAST)


def _draw_shares(panel: Axes, rows: Sequence[NumericsRow], low: int, high: int) -> AxesImage:
    shares = np.full((len(rows), high - low + 1), np.nan)
    for n, row in enumerate(rows):
        for exponent, share in _shares(row):
            shares[n, exponent - low] = share
    image = panel.imshow(
        shares,
        aspect="auto",
        interpolation="nearest",
        extent=(low, high + 1, len(rows), 0),
        cmap="viridis_r",
        norm=LogNorm(LEAST, 1),
    )
    names = [shortened(row.name, MAX_NAME) for row in rows]
    panel.set_yticks([n + 0.5 for n in range(len(rows))], names)
    panel.tick_params(axis="y", labelsize=7)
    return image


def _draw_limits(panel: Axes, low: int, high: int, scale: float | None) -> None:
    """The formats' limits that lie in the picture; dashed, float16's at a loss scale."""
    lines = [(name, 0.0, "-") for name in LIMITS]
    if scale is not None:
        lines.append(("fp16", math.log2(scale), "--"))
    for name, shift, style in lines:
        text = f"{LONG[name]}'s limits{', loss scaled' if style == '--' else ''}"
        for place in LIMITS[name]:
            if low <= place - shift <= high + 1:
                own = colour(1 + [*LIMITS].index(name))
                panel.axvline(place - shift, color=own, lw=1, ls=style, label=text)


def _caption(result: NumericsResult) -> str:
    """The meaning of columns, colours and lines."""
    scale, dashed = result.loss_scale.recommended, ""
    if scale is not None:
        dashed = " Dashed: float16's limits for gradients times the recommended loss scale, "
        dashed += f"{number(scale)}."
    return (
        "A row is a layer's tensor, a column a power of two, the colour the share of the row's "
        "values with that exponent. Solid lines: the limits of float16 (2^-24, 2^-14, 2^16) and "
        "bfloat16 (2^-133, 2^-126, 2^128), where they lie in the picture; values left of a "
        "format's first limit become 0, left of the second they lose bits, right of the third "
        f"they become infinite.{dashed}"
    )
