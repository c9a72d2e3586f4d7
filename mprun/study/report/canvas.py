"""The colours and the style of all plots, and their conversion to SVG and PNG.

A figure is drawn once, as wide as a phone's page, in the light scheme; a wide page and a file show
the same one larger. On a page it follows the page's scheme. Ten colours are too many to identify by
colour alone, so each variant also has its own marker, and its name is beside it.

matplotlib is used through its objects, without pyplot and without a window.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

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
        caption = " ".join((self.caption, *self.notes))
        with style():
            made = draw()
            svg = _inline(made, f"plot-{self.name}", alt)  # before the frame is written around it
            return self._replace(svg=svg, png=_framed(made, alt, caption, ["png"])["png"])


# ---- colours -------------------------------------------------------------------------------------

# The colours of the series come from a search. Their contrast with the page is at least 3:1 (WCAG
# 2.1, non-text contrast). Their distances from each other and from the ink, in OKLab, are as large
# as ten colours allow, for normal sight and for red-, green- or blue-blindness (Machado et al.
# 2009).
# A role to its colour in the light and in the dark scheme.
COLOURS = {
    "paper": ("#ffffff", "#15171a"),
    "ink": ("#1b1d21", "#e8e8e4"),
    "muted": ("#5d636d", "#a0a5ae"),
    "line": ("#d5d8dd", "#383c43"),
    "wash": ("#eef0f3", "#20242a"),  # Areas behind figures: the margin, a hovered row
    "good": ("#1c6b43", "#7cc79d"),  # Text of verdicts: equivalent or better
    "bad": ("#a3262b", "#f0908f"),  # worse
    "open": ("#7a5600", "#dfb75c"),  # inconclusive
    "series-1": ("#224fad", "#5884c1"),  # Variants but the baseline, or formats
    "series-2": ("#8e4306", "#eb8f13"),
    "series-3": ("#0aa48a", "#3acba2"),
    "series-4": ("#60225c", "#d89fff"),
    "series-5": ("#b48b09", "#7f7712"),
    "series-6": ("#707a33", "#a8ad6a"),
    "series-7": ("#8f7df5", "#7457c2"),
    "series-8": ("#760906", "#bc7e60"),
    "series-9": ("#e16c71", "#c5507a"),
}
LIGHT, DARK = ({role: pair[place] for role, pair in COLOURS.items()} for place in (0, 1))
# The CSS variable of each colour that figures are drawn in; all of them differ
VARIABLES = {colour: f"var(--{role})" for role, colour in LIGHT.items()}

MEMORY = ("#1f3f66", "#456f9f", "#7ba0c6", "#b3cbe2", "#9a5b1d", "#dfae6e")
"""The categories of memory. Two ramps: blue for tensors that live as long as the model (parameters,
buffers, gradients, optimizer state), brown for those that a step makes and frees (activations,
temporary)."""

# Filled shapes only: a hollow marker means an emulated variant
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*")


def declarations(theme: Mapping[str, str]) -> str:
    """CSS variables with a scheme's colours: `--ink: #1b1d21; ...`."""
    return " ".join(f"--{role}: {colour};" for role, colour in theme.items())


def colour(index: int, theme: Mapping[str, str] = LIGHT) -> str:
    """The colour of the variant in row `index`: ink for the baseline, else of the series."""
    return theme["ink" if index == 0 else f"series-{1 + (index - 1) % 9}"]


def marker(index: int) -> str:
    """matplotlib's name of its marker. Ten markers and nine colours make 90 pairs."""
    return MARKERS[index % len(MARKERS)]


# ---- files ---------------------------------------------------------------------------------------


def picture_files(
    name: str, title: str, caption: str, draw: Callable[[], Figure]
) -> dict[str, bytes]:
    """A drawing as the files `name.png` and `name.svg`: name to content.

    A page has its own text around a drawing; a file has the title above it, and below it the
    caption: the meaning of colours, lines and marks, and the number of runs or steps.
    """
    with style():
        files = _framed(draw(), title, caption, ["png", "svg"])
    return {f"{name}.{kind}": content for kind, content in files.items()}


def _framed(made: Figure, title: str, caption: str, kinds: Sequence[str]) -> dict[str, bytes]:
    """Files of a figure, with the frame's text above and below it, by their kinds.

    The text lies outside of the figure, and a file has room for it. So the drawing is the same as
    on a page.
    """
    FigureCanvasAgg(made)
    made.set_dpi(PNG_DPI)  # letters are as wide in the layout as in the PNG
    bounds = _write_frame(made, title, caption)
    files = {}
    for kind in kinds:
        file = io.BytesIO()
        made.savefig(file, format=kind, dpi=PNG_DPI, metadata=NO_METADATA[kind], bbox_inches=bounds)
        files[kind] = file.getvalue()
    return files


def _write_frame(drawn: Figure, title: str, caption: str) -> Bbox:
    """Write title and caption around a figure; the area of all three, in inches."""
    drawn.draw_without_rendering()  # the layout is that of the figure alone
    drawn.set_layout_engine("none")
    for legend in drawn.legends:  # so is the place of a legend
        legend.set_bbox_to_anchor((0, 0, 1, 1), transform=drawn.transFigure)
    width_in, height_in = drawn.get_size_inches()
    line_in = LINE_SPACING * FRAME_POINTS / 72
    letters = int(width_in * LETTERS_PER_IN)
    above = [part for line in title.splitlines() for part in wrap(line, letters)]
    below = wrap(caption, letters)
    style: dict[str, Any] = {"fontsize": FRAME_POINTS, "linespacing": LINE_SPACING, "ha": "left"}
    above_in, below_in = ((len(x) * line_in + 2 * MARGIN_IN) if x else 0 for x in (above, below))
    top, bottom = 1 + MARGIN_IN / height_in, -MARGIN_IN / height_in
    drawn.text(0, top, "\n".join(above), va="bottom", weight="bold", **style)
    drawn.text(0, bottom, "\n".join(below), va="top", color=LIGHT["muted"], **style)
    return Bbox.from_extents(-MARGIN_IN, -below_in, width_in + MARGIN_IN, height_in + above_in)


RULES: dict[str, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "text.parse_math": False,  # a label with dollar signs is a label
    "text.color": LIGHT["ink"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["line"],
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.5,
    "figure.facecolor": LIGHT["paper"],
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
    root = ElementTree.fromstring(file.getvalue())
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in (f"{SVG}metadata", f"{SVG}style"):  # a style would be the whole page's
                element.remove(child)
        element.tag = element.tag.removeprefix(SVG)
        given = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib = {key: _restyled(key, value, name) for key, value in given.items()}
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


def _restyled(key: str, value: str, name: str) -> str:
    """An attribute with ids unique to the drawing `name`, and colours and fonts of the page."""
    if key in ("id", "href"):
        return f"#{name}-{value[1:]}" if key == "href" else f"{name}-{value}"
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
