"""The timeline of a step's memory as a picture: categories stacked over the ops, a panel a mode.

matplotlib is imported when a picture is drawn; figures are made without pyplot, whose state belongs
to the user's program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mprun.report.memory_tables import CATEGORIES, UNITS, amount, percent, unit_for

COLOURS = {
    "parameters": "#0072b2",
    "buffers": "#999999",
    "gradients": "#e69f00",
    "optimizer_state": "#56b4e9",
    "activations": "#009e73",
    "temporary": "#d55e00",
}
"""Okabe and Ito's, told apart by colour-blind readers too."""
SHADES = {"forward": "#e8f1e8", "backward": "#f5ece0", "optimizer": "#e6eaf4", "other": "#ffffff"}
POINTS = 2000
"""Ops drawn at most; of more, the one with the most alive in each stretch."""
COLUMNS = 3
"""Panels beside one another."""


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `memory.png` and `memory.svg` into `folder`; `found` is what `memory.json` holds."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    modes = found["modes"]
    columns = min(COLUMNS, len(modes))
    rows = -(-len(modes) // columns)
    paths = [folder / "memory.png", folder / "memory.svg"]
    with rc_context({"svg.hashsalt": "mprun", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(4.6 * columns + 0.4, 3.4 * rows + 0.6), layout="constrained")
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
        highest = max(mode["bytes"]["peak"] for mode in modes)
        unit = unit_for(highest)
        for n, panel in enumerate(panels):
            if n >= len(modes):
                panel.set_visible(False)
                continue
            _panel(panel, modes[n], modes[0], highest / UNITS[unit], UNITS[unit])
        for row in range(rows):
            figure.axes[row * columns].set_ylabel(f"{unit} alive")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(paths[0], dpi=110)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _panel(
    axes: Any, mode: Mapping[str, Any], first: Mapping[str, Any], highest: float, unit: int
) -> None:
    timeline = mode["timeline"]
    shown = thinned([timeline[key] for key in CATEGORIES])
    stacks = [[timeline[key][i] / unit for i in shown] for key in CATEGORIES]
    _phases(axes, timeline["phase"], highest)
    axes.stackplot(
        shown,
        stacks,
        labels=list(CATEGORIES.values()),
        colors=[COLOURS[key] for key in CATEGORIES],
        step="mid" if len(shown) < POINTS else None,
        lw=0,
    )
    at, peak = mode["peak_at"], mode["bytes"]["peak"] / unit
    axes.plot(at["point"], peak, marker="v", color="black", ms=6, clip_on=False)
    right = at["point"] > len(timeline["op"]) / 2
    axes.annotate(
        f"{amount(mode['bytes']['peak'])}\n{at['op']}, {at['module'] or '(root)'}",
        (at["point"], peak),
        xytext=(-6 if right else 6, 5),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=8,
    )
    change = "" if mode is first else f": {percent(mode['ratio'])}"
    axes.set_title(f"{mode['label']}{change}")
    axes.set_xlabel("op of the step")
    axes.set_xlim(0, max(len(timeline["op"]) - 1, 1))
    axes.set_ylim(0, highest * 1.28)
    axes.spines[["top", "right"]].set_visible(False)


def _phases(axes: Any, phases: Sequence[str], highest: float) -> None:
    """Shade the stretches of the phases, and name the longest of each phase."""
    longest: dict[str, tuple[int, int]] = {}
    for phase, start, stop in stretches(phases):
        axes.axvspan(start - 0.5, stop - 0.5, color=SHADES[phase], lw=0, zorder=0)
        before = longest.get(phase, (0, 0))
        longest[phase] = max(before, (start, stop), key=lambda s: s[1] - s[0])
    for phase, (start, stop) in longest.items():
        if phase != "other":
            wide = (stop - start) * 8 > len(phases)
            place = {"ha": "center", "va": "top", "rotation": 0 if wide else 90}
            middle = (start + stop - 1) / 2
            axes.text(middle, highest * 1.26, phase, fontsize=8, color="0.4", **place)


def stretches(phases: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Each run of equal phases: phase, its first op, the op after its last."""
    for phase, group in groupby(range(len(phases)), key=phases.__getitem__):
        numbers = list(group)
        yield phase, numbers[0], numbers[-1] + 1


def thinned(rows: Sequence[Sequence[int]], points: int = POINTS) -> list[int]:
    """At most `points` ops to draw, the one with the largest sum of each stretch of ops.

    Args:
        rows: bytes after each op, a row for each category.
        points: how many.
    """
    totals = [sum(column) for column in zip(*rows, strict=True)]
    width = -(-len(totals) // points)
    starts = range(0, len(totals), width)
    return [max(range(s, min(s + width, len(totals))), key=totals.__getitem__) for s in starts]
