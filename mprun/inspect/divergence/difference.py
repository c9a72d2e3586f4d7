"""Where two models part: the errors of both sides by module, the record of a side, the table.

Of each module, forward and backward, and of each side:

    arising     its own error: of what the module's own code computes from the inputs that this side
                gave it, relative to float64
    inherited   the error that float64 makes of these inputs: it came from earlier modules
    bias        the mean of the own error; the rest of it is noise
    explained   the bound: the own error if every result of that code is rounded to the dtype of
                the call, and its inputs and parameters are off by half a unit, times a margin

These are names in files. A capture is made where a side runs, on its device and with its version of
PyTorch; two captures are compared anywhere (`mprun diff`). No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mprun.records.console.fitted_table import FittedTable, figure_column, text_column

SCHEMA_VERSION = 1
MAX_ERROR = 1e99  # Written for an error without a finite size: JSON has no infinity
SHOWN = 12  # Rows of a printed table; diff.json has all


@dataclass(frozen=True)
class SideError:
    """One side's error in a module's own code."""

    dtype: str
    arising: float  # Relative rms; infinite where a number is not finite
    inherited: float
    bias: float  # Mean of the own error, over the rms of the exact numbers
    explained: float  # The largest own error that rounding to the dtype makes

    @property
    def is_explained(self) -> bool:
        """Whether the own error is within its bound."""
        return self.arising <= self.explained


@dataclass(frozen=True)
class CapturedCall:
    """A module's own code in one pass."""

    phase: str  # forward or backward
    module: str  # A name of `named_modules()`; empty for the model itself
    call: int  # The number of the module's call, from 0
    kind: str  # The module's class
    errors: dict[str, SideError]
    """By what is compared: an output, the gradient at an input, a parameter's gradient."""


class OpError(NamedTuple):
    """One op."""

    phase: str
    module: str
    op: str
    dtype: str
    error: float  # The rms of its own error, over the rms of its exact result


@dataclass(frozen=True, kw_only=True)
class CaptureRecord:
    """The content of capture.json."""

    schema_version: int
    recipe: str
    data: str
    data_source: str
    precision: str
    step: int  # Of the checkpoint
    loss: float
    device: str
    hardware: str
    versions: dict[str, str | None]
    weights_sha256: str
    batch_sha256: str
    compiled: bool
    calls: list[CapturedCall]
    ops: list[OpError]


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
    """Where the error is largest beside its bound: an output, the gradient at an input, or a
    parameter's gradient."""
    a: SideError
    b: SideError
    op: str = ""
    """Of a row beyond its bound: the op with the largest error, if ops are visible."""

    @property
    def is_explained(self) -> bool:
        """Whether both sides' errors are within their bounds."""
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
        """The first row beyond its bound in which the sides differ; later ones may inherit it."""
        return next((row for row in self.rows if not row.is_explained and _differ(row)), None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts()))

    def parts(self) -> list[FittedTable | str]:
        """The losses, the rows with the largest errors, where the sides part first, and notes."""
        largest = sorted(self.rows, key=lambda r: -max(r.a.arising, r.b.arising))[:SHOWN]
        return [
            f"loss: {self.losses[0]:.9g} and {self.losses[1]:.9g}",
            _table([row for row in self.rows if row in largest], len(self.rows) - len(largest)),
            _conclusion(self.first),
            *(f"note: {x}" for x in self.notes),
        ]


def _table(rows: Sequence[DifferenceRow], left_out: int) -> FittedTable:
    table = FittedTable(
        "",
        text_column("pass", 3),
        text_column("module"),
        text_column("what", 4),
        figure_column("own error a"),
        figure_column("b"),
        figure_column("inherited a", 1),
        figure_column("b", 1),
        text_column(""),
        elsewhere="diff.json",
    )
    for row in rows:
        table.add_row(
            row.phase,
            (row.module or "the model") + (f" #{row.call}" if row.call else ""),
            row.what,
            *(f"{x:.1e}" for x in (row.a.arising, row.b.arising)),
            *(f"{x:.1e}" for x in (row.a.inherited, row.b.inherited)),
            "" if row.is_explained else "beyond rounding",
        )
    if left_out:
        table.caption = f"({left_out} rows with smaller errors are not shown)"
    return table


def _conclusion(first: DifferenceRow | None) -> str:
    if first is None:
        return "no error is larger than rounding to its dtype makes"
    side, error = ("a", first.a) if error_ratio(first.a) >= error_ratio(first.b) else ("b", first.b)
    op = f", op {first.op}" if first.op else ""
    return (
        f"first: {first.module or 'the model'} ({first.kind}), {first.phase}{op}: its own error "
        f"in {side} is {error.arising:.1e}; rounding to {error.dtype} makes at most "
        f"{error.explained:.1e}"
    )


def error_ratio(error: SideError) -> float:
    """The own error over its bound."""
    if error.arising == 0:  # an exact module may have a bound of 0
        return 0.0
    return error.arising / error.explained if error.explained else float("inf")


def _differ(row: DifferenceRow) -> bool:
    """Whether the errors, each over its bound, differ by more than a factor of 2.

    An ill-conditioned formula exceeds its bound alike on both sides: that is no difference.
    """
    low, high = sorted((error_ratio(row.a), error_ratio(row.b)))
    return high > 2 * low


def bounded(value: Any) -> Any:
    """Plain values in which numbers that are not finite are the largest one."""
    if isinstance(value, dict):
        return {k: bounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [bounded(v) for v in value]
    if isinstance(value, float) and not abs(value) < MAX_ERROR:
        return MAX_ERROR
    return value
