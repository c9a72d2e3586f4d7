"""The colours of a report, light and dark, and how variants are told apart.

The series' colours were searched for: at least 3:1 against the page (WCAG 2.1, non-text
contrast), and as far from each other and from the ink as ten colours go, for normal sight and with
red-, green- or blue-blindness (Machado et al. 2009), in OKLab. Ten colours are too many to tell
apart by colour alone, so every variant has a marker of its own as well, and its name beside it.

Memory has two ramps: what lives as long as the model (parameters, buffers, gradients, optimizer
state) and what a step makes and drops (activations, temporary).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Theme(NamedTuple):
    """Colours by use; any notation that both CSS and matplotlib read."""

    paper: str
    ink: str
    muted: str
    line: str
    wash: str
    """Areas behind figures: the margin, a hovered row."""
    good: str
    bad: str
    open: str
    """Text of verdicts: keeps the metric, loses it, not settled."""
    series: tuple[str, ...]
    memory: tuple[str, ...]


LIGHT = Theme(
    paper="#ffffff",
    ink="#1b1d21",
    muted="#5d636d",
    line="#d5d8dd",
    wash="#eef0f3",
    good="#1c6b43",
    bad="#a3262b",
    open="#7a5600",
    series=(
        *("#224fad", "#8e4306", "#0aa48a", "#60225c", "#b48b09"),
        *("#707a33", "#8f7df5", "#760906", "#e16c71"),
    ),
    memory=("#1f3f66", "#456f9f", "#7ba0c6", "#b3cbe2", "#9a5b1d", "#dfae6e"),
)

DARK = Theme(
    paper="#15171a",
    ink="#e8e8e4",
    muted="#a0a5ae",
    line="#383c43",
    wash="#20242a",
    good="#7cc79d",
    bad="#f0908f",
    open="#dfb75c",
    series=(
        *("#5884c1", "#eb8f13", "#3acba2", "#d89fff", "#7f7712"),
        *("#a8ad6a", "#7457c2", "#bc7e60", "#c5507a"),
    ),
    memory=("#aecbea", "#7da5cf", "#5580ad", "#3a5d85", "#e0a869", "#96683a"),
)


def named(name: Callable[[str], str]) -> Theme:
    """A theme of what `name` makes of each colour's name: `ink`, `series-1`, ..."""
    return Theme(
        paper=name("paper"),
        ink=name("ink"),
        muted=name("muted"),
        line=name("line"),
        wash=name("wash"),
        good=name("good"),
        bad=name("bad"),
        open=name("open"),
        series=tuple(name(f"series-{i + 1}") for i in range(len(LIGHT.series))),
        memory=tuple(name(f"memory-{i + 1}") for i in range(len(LIGHT.memory))),
    )


def declarations(theme: Theme) -> str:
    """CSS variables with the theme's colours: `--ink: #1b1d21; ...`."""
    names = _flat(named(lambda name: f"--{name}"))
    return " ".join(f"{n}: {colour};" for n, colour in zip(names, _flat(theme), strict=True))


def _flat(theme: Theme) -> list[str]:
    return [x for value in theme for x in ((value,) if isinstance(value, str) else value)]


def sentinels() -> tuple[Theme, dict[str, str]]:
    """A theme of colours nobody uses, and the CSS variable that each one stands for."""
    found: dict[str, str] = {}

    def stand_in(name: str) -> str:
        colour = f"#fe{len(found):02x}fe"
        found[colour] = f"var(--{name})"
        return colour

    return named(stand_in), found


MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*")


def colour(theme: Theme, index: int) -> str:
    """Of the variant at `index` of the table: ink for the baseline, then the series in turn."""
    return theme.ink if index == 0 else theme.series[(index - 1) % len(theme.series)]


def marker(index: int) -> str:
    """matplotlib's name of its marker. Ten markers and nine colours: 90 pairs before one recurs."""
    return MARKERS[index % len(MARKERS)]
