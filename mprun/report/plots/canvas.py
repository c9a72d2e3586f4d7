"""The style of all plots, and their conversion to SVG and PNG.

A figure is drawn once, in the light scheme. The SVG of a page follows the page's scheme: the CSS
variable of its role takes the place of each colour. Its text stays text, in the page's font. Ids
are made unique and style sheets are removed, so that a drawing does not affect the rest of the
page. Dates and versions are left out: the same runs give the same bytes.

matplotlib is used through its objects, without pyplot and without a window. A drawing uses none of
its global settings or the user's matplotlibrc, and does not change them.
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
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from mprun.compare.comparison import Comparison, Variant
from mprun.console.formatting import counted
from mprun.report import cells
from mprun.report.theme import LIGHT, VARIABLES, colour, marker

WIDTH_IN, NARROW_IN = 9.2, 4.2
"""On a page of 1,280 pixels a point of a wide figure is 1.45 CSS pixels: 8.5 points read as 12
pixels. On a phone, 390 pixels wide, a narrow figure's text reads as 10 pixels: as wide as that are
the drawings for phones, and all picture files, which may be shown on one."""

PNG_DPI = 220
NO_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
}

FRAME_POINTS, LINE_SPACING, LETTERS_PER_IN, MARGIN_IN = 8.5, 1.3, 13, 0.1
"""The text around a picture file: its size, and as many letters of it as fit an inch."""

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}href"

TIMES_FACTOR = 8.0
"""Times are drawn on a logarithmic axis if the largest is more than this factor above the least."""

MAX_LABEL, MAX_NARROW_LABEL = 30, 20
MARKER_SIZE = 6.5


class Plot(NamedTuple):
    """A plot, or why there is none."""

    name: str
    title: str
    caption: str
    """The plot's content, with n and the meaning of bars and bands; or why there is no plot."""
    notes: tuple[str, ...] = ()
    """Data that is missing from it."""
    svg: str = ""
    """An element for a page; empty without a drawing."""
    narrow_svg: str = ""
    """The same for a page of a phone's width."""
    png: bytes = b""

    def drawn(self, alt: str, draw: Callable[[float], Figure]) -> Plot:
        """The plot with its drawings; `alt` is the title of its PNG, and describes its SVGs to
        those who cannot see them. `draw` gets the figure's width in inches."""
        frame = PictureFrame(alt, " ".join((self.caption, *self.notes)))
        name = f"plot-{self.name}"
        with style():
            wide, narrow = draw(WIDTH_IN), draw(NARROW_IN)
            return self._replace(
                svg=_inline(_svg(wide), name, alt),
                narrow_svg=_inline(_svg(narrow), f"{name}-narrow", alt, "plot narrow"),
                png=_file(narrow, frame, "png"),
            )


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
    caption: str
    """The meaning of colours, lines and marks, and the number of runs or steps."""


def picture_files(name: str, frame: PictureFrame, draw: Callable[[], Figure]) -> dict[str, bytes]:
    """A drawing as the files `name.png` and `name.svg`: name to content."""
    files = {}
    for kind in ("png", "svg"):
        with style():
            files[f"{name}.{kind}"] = _file(draw(), frame, kind)
    return files


def _svg(made: Figure) -> str:
    file = io.StringIO()
    FigureCanvasSVG(made).print_svg(file, metadata=NO_METADATA["svg"])
    return file.getvalue()


def _file(made: Figure, frame: PictureFrame, kind: str) -> bytes:
    """A file, with the frame's text above and below the drawing.

    The text lies outside of the figure, and the file has room for it. So the drawing is the same as
    on a page.
    """
    file = io.BytesIO()
    FigureCanvasAgg(made)
    if kind == "png":  # letters are as wide in the layout as in the file
        made.set_dpi(PNG_DPI)
    bounds = _write_frame(made, frame)
    made.savefig(file, format=kind, dpi=PNG_DPI, metadata=NO_METADATA[kind], bbox_inches=bounds)
    return file.getvalue()


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


@contextmanager
def style() -> Iterator[None]:
    """Inside, matplotlib has its defaults with our colours, and no warnings of missing glyphs."""
    rules: dict[str, Any] = {
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
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.unicode_minus": True,
        "xtick.color": LIGHT.line,
        "ytick.color": LIGHT.line,
        "xtick.labelcolor": LIGHT.muted,
        "ytick.labelcolor": LIGHT.muted,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "grid.color": LIGHT.line,
        "grid.linewidth": 0.5,
        "figure.facecolor": LIGHT.paper,
        "figure.dpi": 72,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "mprun",
    }
    logger = logging.getLogger("matplotlib")
    level = logger.level
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(rules)  # type: ignore[arg-type,unused-ignore]
        warnings.filterwarnings("ignore", message="Glyph")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _inline(text: str, name: str, alt: str, kind: str = "plot") -> str:
    """An SVG file as an element of a page."""
    root = ElementTree.fromstring(text)
    used = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', text))
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in (f"{SVG}metadata", f"{SVG}style"):
                element.remove(child)
        _own(element, name, used)
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib.update(
        {
            "xmlns": SVG[1:-1],
            "role": "img",
            "aria-labelledby": f"{name}-title",
            "stroke-linejoin": "round",
            "class": kind,
        }
    )
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
    value = re.sub(r"#[0-9a-f]{6}\b", lambda m: VARIABLES.get(m[0], m[0]), value)
    value = re.sub(r"font-family: [^;]*", "font-family: var(--sans)", value)
    value = re.sub(r"(font: [^;]*?px) [^;]*", r"\1 var(--sans)", value)  # matplotlib before 3.10
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", value)


# ---- figures and axes --------------------------------------------------------------------------


def figure(height_in: float, width_in: float) -> Figure:
    """An empty figure."""
    return Figure(figsize=(width_in, height_in), layout="constrained", dpi=72)


def is_narrow(width_in: float) -> bool:
    """Whether names stand above their rows, and legends have few columns."""
    return width_in < WIDTH_IN / 2


def _width_in(owner: Axes | Figure) -> float:
    made = owner if isinstance(owner, Figure) else owner.figure
    return float(made.bbox.width / made.dpi)


COLUMNS = {1: 1, 2: 2, 4: 2}
HEIGHT_IN = {1: 2.8, 2: 2.3}


def panels(count: int, width_in: float) -> tuple[Figure, list[Axes]]:
    """`count` axes with common scales, in rows of up to three; the last row may be shorter.

    A narrow figure has two in a row, or one of two.
    """
    columns = 1 + (count > 2) if is_narrow(width_in) else COLUMNS.get(count, 3)
    lines = -(-count // columns)
    height_in = 1.5 if is_narrow(width_in) else HEIGHT_IN.get(columns, 1.6)
    made = figure(height_in * lines + 0.4, width_in)
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


def mark(variant: Variant, index: int, size: float = MARKER_SIZE) -> dict[str, Any]:
    """matplotlib's keywords for a variant's marker without a line; hollow for an emulated one."""
    return {
        "linestyle": "none",
        "marker": marker(index),
        "markersize": size,
        "markeredgecolor": colour(index),
        "markerfacecolor": LIGHT.paper if cells.is_emulated(variant) else colour(index),
        "markeredgewidth": 1.1,
    }


LEGEND: dict[str, Any] = {"handlelength": 0.9, "handletextpad": 0.45, "columnspacing": 1.3}


def name_variants(owner: Axes | Figure, variants: dict[int, Variant], **where: Any) -> None:
    """A legend with the marker and the name of each variant, by its row in the table."""
    keys = [Line2D([], [], **mark(v, i, 5.0), label="name") for i, v in variants.items()]
    legend = owner.legend(handles=keys, fontsize=8.5, **LEGEND, **where)
    is_small = is_narrow(_width_in(owner))
    for text, variant in zip(legend.get_texts(), variants.values(), strict=True):
        # a handle's label may not begin with "_"
        text.set_text(cells.plain(variant.label, MAX_NARROW_LABEL) if is_small else label(variant))


def name_panel(axes: Axes, variant: Variant, index: int) -> None:
    """A panel's heading: the variant's marker and name."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0.2, "borderaxespad": 0}
    name_variants(axes, {index: variant}, **place)


def spread_axis(
    axes: Axes, name: Literal["x", "y"], values: Sequence[float], factor: float
) -> bool:
    """Make an axis logarithmic if its values, all positive, are farther apart than a factor.

    Returns:
        Whether it is.
    """
    if not values or min(values) <= 0 or max(values) / min(values) <= factor:
        return False
    axes.set(**{f"{name}scale": "log"})
    axis: Axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())
    return True


def legend_above(made: Figure, axes: Axes) -> None:
    """A legend in one row above the axes, or in rows of three."""
    handles, labels = axes.get_legend_handles_labels()
    made.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=3 if is_narrow(made.get_figwidth()) else len(labels),
        handleheight=0.9,
        fontsize=8,
        **LEGEND,
    )


def name_rows(axes: Axes, names: Sequence[str], first: int = 0, above: float = 0.2) -> None:
    """Rows from the top, each with its name at the left; or above, if the figure is narrow.

    `above` is the distance of such a name from the middle of its row, as a share of a row.
    """
    rows, top = range(first, first + len(names)), first - 0.6
    if is_narrow(_width_in(axes)):
        top = first - above - 0.4
        axes.set_yticks([])
        for row, name in zip(rows, names, strict=True):
            axes.text(0, row - above, name, transform=axes.get_yaxis_transform(), va="bottom")
    else:
        axes.set_yticks(rows, names)
        for tick in axes.get_yticklabels():
            tick.set_color(axes.title.get_color())
    axes.set_ylim(first + len(names) - 0.4, top)
    axes.spines["left"].set_visible(False)


def key(index: int, is_hollow: bool) -> str:
    """A variant's marker as a small SVG element, for the space beside its name."""
    style = MarkerStyle(marker(index))
    outline = style.get_path().transformed(style.get_transform())
    points = [
        f"{'M' if code == Outline.MOVETO else 'L'}{xy[-2] * 11:.2f} {-xy[-1] * 11:.2f}"
        for xy, code in outline.iter_segments(curves=False)
        if code != Outline.CLOSEPOLY
    ]
    line = VARIABLES[colour(index)]
    fill = "none" if is_hollow else line
    return (
        '<svg class="key" viewBox="-8 -8 16 16" aria-hidden="true">'
        f'<path d="{" ".join(points)} Z" style="fill: {fill}; stroke: {line}"/></svg>'
    )
