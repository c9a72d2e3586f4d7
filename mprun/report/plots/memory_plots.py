"""The timeline of a step's memory: categories stacked over the ops, a panel for each mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mprun.records.memory_record import MemoryRecord, ModeMemory
from mprun.records.run_record import MEMORY_CATEGORIES
from mprun.report.memory_tables import NAMES, UNITS, amount, change_text, unit_for
from mprun.report.plots.canvas import PictureFrame, legend_above, panels, save
from mprun.report.theme import Theme

SHADED = ("forward", "optimizer")
"""Phases with a shaded background, to separate them from the others."""
POINTS, ALL_POINTS = 2000, 8000
"""The most ops drawn in a panel and in all: of each stretch of ops the one with the largest sum."""
HEADROOM = 1.28
"""The axis over the highest peak, for the phases' names."""


def save_memory_plot(record: MemoryRecord, folder: Path) -> list[Path]:
    """Write `memory.png` and `memory.svg` into `folder`; the paths."""
    modes = ", ".join(mode.label for mode in record.modes)
    counted = [mode for mode in record.modes if mode.same_as is None]
    alike = Counter(mode.same_as for mode in record.modes)
    frame = PictureFrame(
        f"Memory during one training step of {record.recipe} on {record.device}: {modes}",
        "Bytes alive after each op of the step, by category, counted on fake tensors. Triangle: "
        "the peak, with the op and the module that reach it. A change in per cent is that of the "
        f"peak against {record.against}. Blue: tensors that live as long as the model. Brown: "
        "those that a step makes and frees.",
    )
    return save(folder, "memory", frame, lambda theme: _draw(counted, alike, theme))


def _draw(modes: Sequence[ModeMemory], alike: Mapping[str | None, int], theme: Theme) -> Figure:
    """A panel for each mode that was counted; `alike` has how many others share its count."""
    made, axes_of = panels(len(modes), share_x=False, height_in=3.2)
    highest = max(mode.bytes["peak"] for mode in modes)
    unit = unit_for(highest)
    for axes, mode in zip(axes_of, modes, strict=True):
        _draw_timeline(axes, mode, UNITS[unit], min(POINTS, ALL_POINTS // len(modes)), theme)
        _draw_phases(axes, mode.timeline.phase, highest / UNITS[unit], theme)
        change = "" if mode is modes[0] or mode.ratio is None else f": {change_text(mode.ratio)}"
        others = f" and {alike[mode.label]} more" if alike[mode.label] else ""
        axes.set_title(f"{mode.label}{others}{change}")
        axes.set_xlabel("op of the step")
        axes.set_xlim(0, max(len(mode.timeline.op) - 1, 1))
        axes.set_ylim(0, highest / UNITS[unit] * HEADROOM)
    made.supylabel(f"{unit} alive", fontsize=8.5, color=theme.muted)
    legend_above(made, axes_of[0])
    return made


def _draw_timeline(axes: Axes, mode: ModeMemory, unit: int, points: int, theme: Theme) -> None:
    rows = [getattr(mode.timeline, category) for category in MEMORY_CATEGORIES]
    shown = thinned(rows, points)
    axes.stackplot(
        shown,
        [[row[i] / unit for i in shown] for row in rows],
        labels=[NAMES[category][0] for category in MEMORY_CATEGORIES],
        colors=theme.memory,
        step="mid" if len(shown) < points else None,
        lw=0,
    )
    at, peak = mode.peak_at, mode.bytes["peak"]
    axes.plot(at.point, peak / unit, marker="v", color=theme.ink, ms=6, clip_on=False)
    is_right = at.point > len(mode.timeline.op) / 2
    axes.annotate(
        f"{amount(peak)}\n{at.op}, {at.module or '(root)'}",
        (at.point, peak / unit),
        xytext=(-6 if is_right else 6, 5),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="bottom",
    )


def _draw_phases(axes: Axes, phases: Sequence[str], highest: float, theme: Theme) -> None:
    """Shade the stretches of the phases, and name the longest of each phase."""
    longest: dict[str, tuple[int, int]] = {}
    for phase, start, stop in stretches(phases):
        if phase in SHADED:
            axes.axvspan(start - 0.5, stop - 0.5, color=theme.wash, lw=0, zorder=0)
        before = longest.get(phase, (0, 0))
        longest[phase] = max(before, (start, stop), key=lambda s: s[1] - s[0])
    for phase, (start, stop) in longest.items():
        if phase != "other":
            is_wide = (stop - start) * 8 > len(phases)
            axes.text(
                (start + stop - 1) / 2,
                highest * 1.26,
                phase,
                color=theme.muted,
                ha="center",
                va="top",
                rotation=0 if is_wide else 90,
            )


def stretches(phases: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Each stretch of equal phases: phase, its first op, the op after its last."""
    for phase, group in groupby(range(len(phases)), key=phases.__getitem__):
        numbers = list(group)
        yield phase, numbers[0], numbers[-1] + 1


def thinned(rows: Sequence[Sequence[int]], points: int = POINTS) -> list[int]:
    """At most `points` ops: of each stretch of ops the one with the largest sum over `rows`."""
    totals = [sum(column) for column in zip(*rows, strict=True)]
    width = -(-len(totals) // points)
    starts = range(0, len(totals), width)
    return [max(range(s, min(s + width, len(totals))), key=totals.__getitem__) for s in starts]
