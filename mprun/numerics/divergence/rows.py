"""The errors of two sides, module by module, and the first that their dtypes do not explain."""

from __future__ import annotations

from dataclasses import dataclass

from mprun.records.capture_record import OpError, SideError

SHOWN = 12
"""Rows of a printed table."""


@dataclass(frozen=True)
class DifferenceRow:
    """A module's own code in one pass."""

    phase: str
    """forward or backward."""
    module: str
    """A name of `named_modules()`; empty for the model itself."""
    call: int
    """The number of the module's call, from 0."""
    kind: str
    """The module's class."""
    what: str
    """Where the error is the furthest from what its dtype explains: an output, the gradient at an
    input, or a parameter's gradient."""
    a: SideError
    b: SideError
    op: str = ""
    """Of a row that is not explained: the op with the largest error, if ops are visible."""

    @property
    def is_explained(self) -> bool:
        """Whether the dtypes explain both sides' errors."""
        return self.a.is_explained and self.b.is_explained


@dataclass(frozen=True)
class Difference:
    """Where two models part; printed, it is a table."""

    rows: tuple[DifferenceRow, ...]
    """In the order they ran: the forward pass, then the backward pass."""
    ops: tuple[tuple[OpError, ...], tuple[OpError, ...]]
    """The ops of either side."""
    losses: tuple[float, float]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> DifferenceRow | None:
        """The first row that the dtypes do not explain, and in which the sides differ."""
        return next((row for row in self.rows if not row.is_explained and _part(row)), None)

    def __str__(self) -> str:
        lines = [f"loss: {self.losses[0]:.9g} and {self.losses[1]:.9g}", HEADING]
        largest = sorted(self.rows, key=lambda r: -max(r.a.arising, r.b.arising))[:SHOWN]
        lines += [_line(row) for row in self.rows if row in largest]
        if len(self.rows) > len(largest):
            lines.append(
                f"({len(self.rows) - len(largest)} rows with smaller errors are not shown)"
            )
        return "\n".join([*lines, _conclusion(self.first), *(f"note: {x}" for x in self.notes)])


HEADING = (
    f"{'pass':9}{'module':28}{'what':22}{'arises in a':>13}{'in b':>11}{'inherited a':>13}{'b':>11}"
)


def _line(row: DifferenceRow) -> str:
    name = (row.module or "the model") + (f" #{row.call}" if row.call else "")
    mark = "" if row.is_explained else "  not explained"
    return (
        f"{row.phase:9}{name[-27:]:28}{row.what[-21:]:22}{row.a.arising:13.1e}{row.b.arising:11.1e}"
        f"{row.a.inherited:13.1e}{row.b.inherited:11.1e}{mark}"
    )


def _conclusion(first: DifferenceRow | None) -> str:
    if first is None:
        return "no error is larger than its dtype explains"
    side, error = ("a", first.a) if excess(first.a) >= excess(first.b) else ("b", first.b)
    op = f", op {first.op}" if first.op else ""
    return (
        f"first: {first.module or 'the model'} ({first.kind}), {first.phase}{op}: an error of "
        f"{error.arising:.1e} arises in {side}; {error.dtype} explains {error.explained:.1e}"
    )


def excess(error: SideError) -> float:
    """How many times as large as explained the arising error is."""
    if error.arising == 0:
        return 0.0
    return error.arising / error.explained if error.explained else float("inf")


def _part(row: DifferenceRow) -> bool:
    """Whether one side's excess is larger than the other's by a factor of 2."""
    low, high = sorted((excess(row.a), excess(row.b)))
    return high > 2 * low
