"""The style of all plots, and their conversion to SVG and PNG.

A figure is drawn once, as wide as a phone's page, in the light scheme; a wide page and a file show
the same one larger. On a page it follows the page's scheme.

matplotlib is used through its objects, without pyplot and without a window.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from mprun.records.console.formatting import counted
from mprun.study.compare.comparison import Comparison, Variant
from mprun.study.report import cells
from mprun.study.report.theme import LIGHT, VARIABLES, colour, marker

# On a phone, 390 pixels wide, 8.5 points of a figure of this width read as 10 pixels
WIDTH_IN = 4.2

PNG_DPI = 220  # A file of 924 pixels: twice the width of a phone's page, for sharp screens
# Dates and versions are left out of the files: the same runs give the same bytes.
NO_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
}

# The text around a picture file: its size, and as many letters of it as fit an inch
FRAME_POINTS, LINE_SPACING, LETTERS_PER_IN, MARGIN_IN = 8.5, 1.3, 13, 0.1

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}href"

MAX_LABEL = 30
MAX_LEGEND_LABEL = 20  # Two names stand side by side in a legend


class Plot(NamedTuple):
    """A plot, or why there is none."""

    name: str
    title: str
    caption: str
    """The plot's content, with n and the meaning of bars and bands; or why there is no plot."""
    notes: tuple[str, ...] = ()  # Data that is missing from it
    svg: str = ""  # An element for a page; empty without a drawing
    png: bytes = b""

    def drawn(self, alt: str, draw: Callable[[], Figure]) -> Plot:
        """The plot with its drawing; `alt` is the title of its PNG, and describes its SVG to those
        who cannot see it."""
        frame = PictureFrame(alt, " ".join((self.caption, *self.notes)))
        with style():
            made = draw()
            svg = _inline(made, f"plot-{self.name}", alt)  # before the frame is written around it
            return self._replace(svg=svg, png=_framed(made, frame, ["png"])["png"])


def seeds(comparison: Comparison) -> str:
    """`n = 3 seeds`: the runs of the variants."""
    return counts([len(v.runs) for v in comparison.variants], "seed")


def counts(numbers: Sequence[int], thing: str) -> str:
    """`n = 3 seeds`, or `n = 2 to 5 seeds` if they differ."""
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"n = {f'{low} to ' if low < high else ''}{counted(high, thing)}"


# ---- files ---------------------------------------------------------------------------------------


class PictureFrame(NamedTuple):
    """What a picture file has around its drawing. A page has its own text around it."""

    title: str
    caption: str  # The meaning of colours, lines and marks, and the number of runs or steps


def picture_files(name: str, frame: PictureFrame, draw: Callable[[], Figure]) -> dict[str, bytes]:
    """A drawing as the files `name.png` and `name.svg`: name to content."""
    with style():
        files = _framed(draw(), frame, ["png", "svg"])
    return {f"{name}.{kind}": content for kind, content in files.items()}


def _framed(made: Figure, frame: PictureFrame, kinds: Sequence[str]) -> dict[str, bytes]:
    """Files of a figure, with the frame's text above and below it, by their kinds.

    The text lies outside of the figure, and a file has room for it. So the drawing is the same as
    on a page.
    """
    FigureCanvasAgg(made)
    made.set_dpi(PNG_DPI)  # letters are as wide in the layout as in the PNG
    bounds = _write_frame(made, frame)
    files = {}
    for kind in kinds:
        file = io.BytesIO()
        made.savefig(file, format=kind, dpi=PNG_DPI, metadata=NO_METADATA[kind], bbox_inches=bounds)
        files[kind] = file.getvalue()
    return files


def _write_frame(drawn: Figure, frame: PictureFrame) -> Bbox:
    """Write title and caption around a figure; the area of all three, in inches."""
    drawn.draw_without_rendering()  # the layout is that of the figure alone
    drawn.set_layout_engine("none")
    for legend in drawn.legends:  # so is the place of a legend
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=drawn.transFigure)
    width_in, height_in = drawn.get_size_inches()
    line_in = LINE_SPACING * FRAME_POINTS / 72
    letters = int(width_in * LETTERS_PER_IN)
    title = [part for line in frame.title.splitlines() for part in wrap(line, letters)]
    caption = wrap(frame.caption, letters)
    style: dict[str, Any] = {"fontsize": FRAME_POINTS, "linespacing": LINE_SPACING, "ha": "left"}
    above_in, below_in = ((len(x) * line_in + 2 * MARGIN_IN) if x else 0 for x in (title, caption))
    top, bottom = 1 + MARGIN_IN / height_in, -MARGIN_IN / height_in
    drawn.text(0, top, "\n".join(title), va="bottom", weight="bold", **style)
    drawn.text(0, bottom, "\n".join(caption), va="top", color=LIGHT.muted, **style)
    return Bbox.from_extents(-MARGIN_IN, -below_in, width_in + MARGIN_IN, height_in + above_in)


RULES: dict[str, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "text.parse_math": False,  # a label with dollar signs is a label
    "text.color": LIGHT.ink,
    "axes.titlecolor": LIGHT.ink,
    "axes.labelcolor": LIGHT.muted,
    "axes.edgecolor": LIGHT.line,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": LIGHT.line,
    "ytick.color": LIGHT.line,
    "xtick.labelcolor": LIGHT.muted,
    "ytick.labelcolor": LIGHT.muted,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "grid.color": LIGHT.line,
    "grid.linewidth": 0.5,
    "figure.facecolor": LIGHT.paper,
    "figure.dpi": 72,  # a point is a pixel of the SVG
    "legend.frameon": False,
    "legend.handlelength": 0.9,
    "legend.handleheight": 0.9,
    "legend.handletextpad": 0.45,
    "legend.columnspacing": 1.3,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mprun",  # else ids are random
}


@contextmanager
def style() -> Iterator[None]:
    """Inside, matplotlib has its defaults with our colours, and no warnings of missing glyphs."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # the user's matplotlibrc must not change a report
        matplotlib.rcParams.update(RULES)  # type: ignore[arg-type,unused-ignore]
        warnings.filterwarnings("ignore", message="Glyph")
        logger.setLevel(logging.ERROR)  # it also logs each font that it does not find
        try:
            yield
        finally:
            logger.setLevel(level)


def _inline(made: Figure, name: str, alt: str) -> str:
    """A figure as an SVG element of a page: ids and colours are not those of other elements."""
    file = io.StringIO()
    FigureCanvasSVG(made).print_svg(file, metadata=NO_METADATA["svg"])
    text = file.getvalue()
    root = ElementTree.fromstring(text)
    used = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', text))
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in (f"{SVG}metadata", f"{SVG}style"):  # a style would be the whole page's
                element.remove(child)
        element.tag = element.tag.removeprefix(SVG)
        _own(element, name, used)
    for key in ("width", "height", "version"):  # the page decides on its size
        root.attrib.pop(key, None)
    root.attrib |= {
        "xmlns": SVG[1:-1],
        "role": "img",
        "aria-labelledby": f"{name}-title",
        "stroke-linejoin": "round",
        "class": "plot",
    }
    title = ElementTree.Element("title", {"id": f"{name}-title"})
    title.text = alt
    root.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def _own(element: ElementTree.Element, name: str, used: set[str]) -> None:
    """Give an element ids unique to this drawing, and colours of the page."""
    identifier = element.attrib.pop("id", None)
    if identifier in used:
        element.set("id", f"{name}-{identifier}")
    target = element.attrib.pop(XLINK, None)
    if target is not None:
        element.set("href", f"#{name}-{target[1:]}")
    for key, value in list(element.attrib.items()):
        element.set(key, _restyled(value, name))


def _restyled(value: str, name: str) -> str:
    value = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", value)
    # The variable of a colour's role: the page's dark scheme changes the drawing too
    value = re.sub(r"#[0-9a-f]{6}\b", lambda m: VARIABLES.get(m[0], m[0]), value)
    value = re.sub(r"font-family: [^;]*", "font-family: var(--sans)", value)
    value = re.sub(r"(font: [^;]*?px) [^;]*", r"\1 var(--sans)", value)  # matplotlib before 3.10
    # A hundredth of a point is enough, and the page is smaller
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", value)


# ---- figures and axes --------------------------------------------------------------------------


def figure(height_in: float) -> Figure:
    """An empty figure."""
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """`count` axes with common scales, two in a row; up to two are one below the other."""
    columns = 2 if count > 2 else 1
    lines = -(-count // columns)  # rounded up
    made = figure(1.5 * lines + 0.4)
    grid = made.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    flat = [axes for line in grid for axes in line]
    for axes in flat[count:]:
        axes.remove()
    for axes in flat[max(0, count - columns) : count]:  # no panel below: its axis is labelled
        axes.tick_params(labelbottom=True)
    return made, flat[:count]


def label(variant: Variant) -> str:
    """A variant's name in a drawing."""
    shown = cells.plain(variant.label, MAX_LABEL)
    return f"{shown} (emulated)" if cells.is_emulated(variant) else shown


def mark(variant: Variant, index: int, size: float = 6.5) -> dict[str, Any]:
    """matplotlib's keywords for a variant's marker without a line; hollow for an emulated one."""
    return {
        "linestyle": "none",
        "marker": marker(index),
        "markersize": size,
        "markeredgecolor": colour(index),
        "markerfacecolor": LIGHT.paper if cells.is_emulated(variant) else colour(index),
        "markeredgewidth": 1.1,
    }


def name_variants(owner: Axes | Figure, variants: dict[int, Variant], **where: Any) -> None:
    """A legend with the marker and the name of each variant, by its row in the table."""
    keys = [Line2D([], [], **mark(v, i, 5.0), label="name") for i, v in variants.items()]
    legend = owner.legend(handles=keys, **where)
    for text, variant in zip(legend.get_texts(), variants.values(), strict=True):
        # a handle's label may not begin with "_"
        text.set_text(cells.plain(variant.label, MAX_LEGEND_LABEL))


def name_panel(axes: Axes, variant: Variant, index: int) -> None:
    """A panel's heading: the variant's marker and name."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0.2, "borderaxespad": 0}
    name_variants(axes, {index: variant}, **place)


def spread_axis(
    axes: Axes, name: Literal["x", "y"], values: Sequence[float], factor: float
) -> None:
    """Make an axis logarithmic if its values, all positive, are farther apart than a factor."""
    if not values or min(values) <= 0 or max(values) / min(values) <= factor:
        return
    axes.set(**{f"{name}scale": "log"})
    axis: Axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())


def legend_above(made: Figure, axes: Axes) -> None:
    """A legend above the axes, in rows of three."""
    handles, labels = axes.get_legend_handles_labels()
    made.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=8)
