"""Figures as text: counts, levels, and numbers with enough digits to compare them with a limit.

An interval end of +0.4996 must not be shown as +0.50 beside a margin of 0.5: the reader would see
another answer than the one that is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def distinct_form(values: Sequence[float], limits: Iterable[float], forms: Sequence[str]) -> str:
    """The first format that rounds no value onto a limit, or to its other side; else the last.

    Args:
        values: what is shown.
        limits: what the values are compared with.
        forms: formats for one number each, from few digits to many.
    """
    sides = [(limit, [_side(x, limit) for x in values]) for limit in limits]
    for form in forms:
        rounded = [float(form.format(x)) for x in values]
        if all([_side(x, limit) for x in rounded] == expected for limit, expected in sides):
            return form
    return forms[-1]


def _side(value: float, limit: float) -> int:
    return int(value > limit) - int(value < limit)


def counted(count: int, thing: str = "run") -> str:
    """`1 run`, `3 runs`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def percent(level: float) -> str:
    """A confidence level: `90 %`, `98.75 %`."""
    return f"{100 * level:.4g} %"
