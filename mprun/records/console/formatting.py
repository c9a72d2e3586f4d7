"""Texts: counts, sizes, shares, times, lists, numbers beside a limit, text from a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mprun.errors import printable
from mprun.records.run_record import Substitution, Summary

# Short names for groups of ATen ops
OP_FAMILIES = {
    "matmuls": ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"),
    "convolutions": ("convolution", "_convolution", "conv1d", "conv2d", "conv3d"),
    "conv gradients": ("convolution_backward",),
}
MAX_NAME = 20  # Characters of an op's name in a table


def counted(count: int, thing: str = "run") -> str:
    """`1 run`, `3 runs`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: up to `most` names."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def joined(names: Sequence[str]) -> str:
    """Names as a sentence has them: `a`, `a and b`, or `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Each reason once, with the names it holds for."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return names


UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def unit_for(size: int) -> str:
    """The unit in which an amount of this size has a readable number of digits."""
    return next((unit for unit, factor in UNITS.items() if size >= 4 * factor), "B")


def size_text(nbytes: int) -> str:
    """An amount of memory with its unit: `1 GiB`, `55.2 MiB`."""
    unit = next((unit for unit, factor in UNITS.items() if nbytes >= factor), "B")
    return f"{nbytes / UNITS[unit]:,.1f}".removesuffix(".0") + f" {unit}"


def share_text(share: float | None) -> str:
    """A share in percent; `-` for None, `0` for zero, and never `0` for more than zero."""
    if share is None:
        return "-"
    if share == 0:
        return "0"
    if share < 1e-4:
        return "<0.01%"
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def change_text(ratio: float) -> str:
    """A ratio as a change: `-28 %`, or `x12` from tenfold on."""
    change = round((ratio - 1) * 100)
    # "0 %" apart: a sign would give +0 %
    return f"x{ratio:,.0f}" if ratio >= 10 else f"{change:+d} %" if change else "0 %"


def significant(value: float | None) -> str:
    """A figure of a measurement with three significant digits; `-` for None."""
    return "-" if value is None else f"{value:.3g}"


def level_text(level: float) -> str:
    """A confidence level: `90 %`, `98.75 %`."""
    return f"{100 * level:.4g} %"


def distinct_form(values: Sequence[float], limits: Iterable[float], forms: Sequence[str]) -> str:
    """The first format that rounds no value onto a limit, or to its other side; else the last.

    An interval end of +0.4996 must not be shown as +0.50 beside a margin of 0.5: it would
    contradict the verdict. The formats, of one number each, go from few digits to many.
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


def shortened(name: str, length: int) -> str:
    """A name in at most `length` characters; its middle is cut."""
    if len(name) <= length:
        return name
    before = (length - 1) // 2  # names of layers differ least in the middle
    return f"{name[:before]}~{name[before + 1 - length :]}"


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
