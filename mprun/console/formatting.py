"""Texts: counts, levels, numbers beside a limit, and text that comes from a record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mprun.errors import printable
from mprun.records.run_record import Substitution, Summary

OP_FAMILIES = {
    "matmuls": ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"),
    "convolutions": ("convolution", "_convolution", "conv1d", "conv2d", "conv3d"),
    "conv gradients": ("convolution_backward",),
}
"""Short names for groups of ATen ops."""
MAX_NAME = 20


def counted(count: int, thing: str = "run") -> str:
    """`1 run`, `3 runs`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def level_text(level: float) -> str:
    """A confidence level: `90 %`, `98.75 %`."""
    return f"{100 * level:.4g} %"


def distinct_form(values: Sequence[float], limits: Iterable[float], forms: Sequence[str]) -> str:
    """The first format that rounds no value onto a limit, or to its other side; else the last.

    An interval end of +0.4996 must not be shown as +0.50 beside a margin of 0.5: it would
    contradict the verdict.

    Args:
        values: the numbers to show.
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


def readable(text: str, length: int = 120) -> str:
    """The first line of a record's text, cut to `length`, without control characters."""
    shown = printable(next(iter(text.strip().splitlines()), ""))
    return shown if len(shown) <= length else f"{shown[: length - 3]}..."


def substitution_label(summaries: Iterable[Summary]) -> str:
    """The ops that native runs did not compute in their own dtype: `matmuls in fp32`.

    A CPU without a fast float16 kernel for an op computes it in float32 and rounds the result
    (`substitutions` in the record). The step time is then the time of that mode on this machine, so
    its ratio is shown. But it is not the time of float16 arithmetic, so no gain is claimed from it.

    Returns:
        The label; empty for emulated runs, which have a label of their own, and without
        substitutions.
    """
    rows = [x for s in summaries if s.execution == "native" for x in s.substitutions]
    families = {_family(row) for row in rows}
    if "convolutions" in families:  # the label includes their gradients
        families.discard("conv gradients")
    ordered = [
        *(name for name in OP_FAMILIES if name in families),
        *sorted(families - {*OP_FAMILIES}),
    ]
    return f"{', '.join(ordered)} in fp32" if ordered else ""


def _family(row: Substitution) -> str:
    op = row.op.removeprefix("aten.").partition(".")[0]
    return next((name for name, ops in OP_FAMILIES.items() if op in ops), readable(op, MAX_NAME))
