"""From a drawing to an inline SVG and a PNG.

The SVG follows the page's light or dark scheme: it is drawn in colours that stand for CSS
variables, which are put in their place afterwards. Its text stays text, in the page's font. What
would reach out of the drawing into the page (ids, style sheets) is made the drawing's own or
removed; dates and versions are left out, so that the same runs give the same bytes.

matplotlib is used through its objects. Its global settings, and the user's matplotlibrc, are put
aside while a drawing is made and put back afterwards.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.path import Path

from mprun.report.theme import LIGHT, Theme, colour, marker, named, sentinels

WIDTH_IN = 9.2
"""At the page's width a point is about 1.45 CSS pixels: 8.5 points read as 12 pixels."""

PNG_DPI = 160
SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}href"


def render(name: str, alt: str, draw: Callable[[Theme], Figure]) -> tuple[str, bytes]:
    """An SVG element to put into a page, and a PNG in the light scheme.

    Args:
        name: the drawing's, a prefix for its ids; no two of a page alike.
        alt: what it shows, for those who do not see it.
        draw: makes the figure in a theme's colours.
    """
    theme, variables = sentinels()
    with _settings(theme):
        svg = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(draw(theme)).print_svg(svg, metadata=nothing)
    with _settings(LIGHT):
        png = io.BytesIO()
        FigureCanvasAgg(draw(LIGHT)).print_png(png, metadata={"Software": None})
    return _inline(svg.getvalue(), name, alt, variables), png.getvalue()


@contextmanager
def _settings(theme: Theme) -> Iterator[None]:
    """matplotlib's defaults with the theme's colours; missing glyphs are no news to the user."""
    rules: dict[str, Any] = {
        "font.size": 8.5,
        "axes.titlesize": 8.5,
        "axes.labelsize": 8.5,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "text.parse_math": False,  # a label with dollar signs is a label
        "text.color": theme.ink,
        "axes.titlecolor": theme.ink,
        "axes.labelcolor": theme.muted,
        "axes.edgecolor": theme.line,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.unicode_minus": True,
        "xtick.color": theme.line,
        "ytick.color": theme.line,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "grid.color": theme.line,
        "grid.linewidth": 0.5,
        "figure.facecolor": "none" if theme is not LIGHT else theme.paper,
        "figure.dpi": 72,
        "savefig.dpi": 72,
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


def figure(height_in: float) -> Figure:
    """An empty figure of the page's width."""
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained", dpi=72)


COLUMNS = {1: 1, 2: 2, 4: 2}
HEIGHT_IN = {1: 2.8, 2: 2.3}


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """`count` axes in rows of up to three, with shared scales; the last row may be shorter."""
    columns = COLUMNS.get(count, 3)
    lines = -(-count // columns)
    made = figure(HEIGHT_IN.get(columns, 1.6) * lines + 0.4)
    grid = made.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    flat = [axes for line in grid for axes in line]
    for axes in flat[count:]:
        axes.remove()
    for axes in flat[max(0, count - columns) : count]:  # no panel below: its axis is labelled
        axes.tick_params(labelbottom=True)
    return made, flat[:count]


def _inline(text: str, name: str, alt: str, variables: dict[str, str]) -> str:
    """matplotlib's SVG file as an element of a page."""
    root = ElementTree.fromstring(text)
    used = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', text))
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in (f"{SVG}metadata", f"{SVG}style"):
                element.remove(child)
        _own(element, name, used, variables)
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
            "class": "plot",
        }
    )
    title = ElementTree.Element("title", {"id": f"{name}-title"})
    title.text = alt
    root.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def _own(
    element: ElementTree.Element, name: str, used: set[str], variables: dict[str, str]
) -> None:
    """Make an element's ids and colours the drawing's."""
    identifier = element.attrib.pop("id", None)
    if identifier in used:
        element.set("id", f"{name}-{identifier}")
    target = element.attrib.pop(XLINK, None)
    if target is not None:
        element.set("href", f"#{name}-{target[1:]}")
    for key, value in list(element.attrib.items()):
        element.set(key, _restyled(value, name, variables))


def _restyled(value: str, name: str, variables: dict[str, str]) -> str:
    value = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", value)
    value = re.sub(r"#[0-9a-f]{6}\b", lambda m: variables.get(m[0], m[0]), value)
    value = re.sub(r"font-family: [^;]*", "font-family: var(--sans)", value)
    value = re.sub(r"(font: [^;]*?px) [^;]*", r"\1 var(--sans)", value)  # matplotlib before 3.10
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", value)


def key(index: int, is_hollow: bool) -> str:
    """A variant's marker as a small SVG element, decoration beside its name."""
    style = MarkerStyle(marker(index))
    outline = style.get_path().transformed(style.get_transform())
    points = [
        f"{'M' if code == Path.MOVETO else 'L'}{xy[-2] * 11:.2f} {-xy[-1] * 11:.2f}"
        for xy, code in outline.iter_segments(curves=False)
        if code != Path.CLOSEPOLY
    ]
    line = colour(named(lambda name: f"var(--{name})"), index)
    fill = "none" if is_hollow else line
    return (
        '<svg class="key" viewBox="-8 -8 16 16" aria-hidden="true">'
        f'<path d="{" ".join(points)} Z" style="fill: {fill}; stroke: {line}"/></svg>'
    )
