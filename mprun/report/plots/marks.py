"""What plots have in common: names, markers, rows, panels, axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mprun.compare.rows import Variant
from mprun.report import cells
from mprun.report.theme import Theme, colour, marker

LOG_FROM = 8.0
"""Times farther apart than this are drawn on a logarithmic axis."""

LONGEST_LABEL = 30
MARKER_SIZE = 6.5


def label(variant: Variant) -> str:
    """A variant's name in a drawing."""
    shown = cells.plain(variant.label, LONGEST_LABEL)
    return f"{shown} (emulated)" if cells.is_emulated(variant) else shown


def face(theme: Theme, variant: Variant, index: int) -> str:
    """What a marker is filled with; an emulated variant's is hollow."""
    return theme.paper if cells.is_emulated(variant) else colour(theme, index)


def mark(theme: Theme, variant: Variant, index: int, size: float = MARKER_SIZE) -> dict[str, Any]:
    """How a variant's marker is drawn: matplotlib's keywords for a line without a line."""
    return {
        "linestyle": "none",
        "marker": marker(index),
        "markersize": size,
        "markeredgecolor": colour(theme, index),
        "markerfacecolor": face(theme, variant, index),
        "markeredgewidth": 1.1,
    }


def name_panel(axes: Axes, variant: Variant, index: int, theme: Theme) -> None:
    """A panel's heading: the variant's marker and name."""
    key = Line2D([], [], **mark(theme, variant, index, 5.0), label="name")
    heading = axes.legend(
        handles=[key],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        handlelength=0.8,
        handletextpad=0.5,
        borderpad=0.2,
        borderaxespad=0,
        fontsize=8.5,
    )
    heading.get_texts()[0].set_text(label(variant))  # a label of a handle may not begin with "_"


def times_axis(axes: Axes, times: Sequence[float]) -> None:
    """Milliseconds, logarithmic where they are far apart, labelled in plain numbers."""
    positive = [t for t in times if t > 0]
    if positive and max(positive) / min(positive) > LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


def name_rows(axes: Axes, names: Sequence[str], first: int = 0) -> None:
    """Rows from the top, each with its name at the left."""
    axes.set_yticks(range(first, first + len(names)), names)
    for tick in axes.get_yticklabels():
        tick.set_color(axes.title.get_color())
    axes.set_ylim(first + len(names) - 0.4, first - 0.6)
    axes.spines["left"].set_visible(False)
