"""All colours of tables, plots and pages, by role: light, dark, and on the terminal.

Ten colours are too many to identify by colour alone, so each variant also has its own marker, and
its name is beside it.
"""

from __future__ import annotations

from typing import NamedTuple


class Theme(NamedTuple):
    """Colours by role, in a notation that both CSS and matplotlib read."""

    paper: str
    ink: str
    muted: str
    line: str
    wash: str  # Areas behind figures: the margin, a hovered row
    good: str
    bad: str
    open: str  # Text of verdicts: equivalent or better, worse, inconclusive
    series: tuple[str, ...]  # Variants but the baseline, or formats


# The colours of the series come from a search. Their contrast with the page is at least 3:1 (WCAG
# 2.1, non-text contrast). Their distances from each other and from the ink, in OKLab, are as large
# as ten colours allow, for normal sight and for red-, green- or blue-blindness (Machado et al.
# 2009).
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
)


# The word of a verdict to the role of its colour
TONES = {"better": "good", "equivalent": "good", "worse": "bad", "inconclusive": "open"}

# The sign before the word on a page, for readers who do not see the colour
SIGNS = {"better": "+", "equivalent": "=", "worse": "\u2212", "inconclusive": "?"}

TERMINAL = {"good": "green", "bad": "red", "open": "yellow"}  # Roles to the terminal's own colours

MEMORY = ("#1f3f66", "#456f9f", "#7ba0c6", "#b3cbe2", "#9a5b1d", "#dfae6e")
"""The categories of memory. Two ramps: blue for tensors that live as long as the model (parameters,
buffers, gradients, optimizer state), brown for those that a step makes and frees (activations,
temporary)."""

FORMATS = {"bf16": 0, "fp16": 1}  # A format to its index among the colours of the series


def declarations(theme: Theme) -> str:
    """CSS variables with the theme's colours: `--ink: #1b1d21; ...`."""
    return " ".join(f"--{name}: {colour};" for name, colour in _by_name(theme).items())


def _by_name(theme: Theme) -> dict[str, str]:
    """Each colour by its name: `ink`, ..., ..., `series-9`."""
    names: dict[str, str] = {}
    for role, value in theme._asdict().items():
        several = () if isinstance(value, str) else enumerate(value, start=1)
        names |= {f"{role}-{n}": colour for n, colour in several} or {role: value}
    return names


# The CSS variable of each colour that figures are drawn in; all of them differ
VARIABLES = {colour: f"var(--{name})" for name, colour in _by_name(LIGHT).items()}

# Filled shapes only: a hollow marker means an emulated variant
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*")


def colour(index: int, theme: Theme = LIGHT) -> str:
    """The colour of the variant in row `index`: ink for the baseline, else of the series."""
    return theme.ink if index == 0 else theme.series[(index - 1) % len(theme.series)]


def marker(index: int) -> str:
    """matplotlib's name of its marker. Ten markers and nine colours make 90 pairs."""
    return MARKERS[index % len(MARKERS)]
