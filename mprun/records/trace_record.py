"""The content of `trace.json`: one training step, op by op. No torch.

`docs/reference/trace.md` explains the fields. A step that cannot run leaves a file with
`schema_version`, `error`, `totals` and `rows` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mprun.records.run_record import BackendRow, Hardware

PHASES = ("forward", "backward", "optimizer", "other")
"""The parts of a step."""


class CastRecord(msgspec.Struct, frozen=True, rename={"from_dtype": "from", "to_dtype": "to"}):
    """A conversion of a tensor's dtype; `from` is a keyword of Python, so fields are renamed."""

    from_dtype: str
    to_dtype: str
    bytes: int
    """Read and written."""
    time_ms: float
    redundant: str | None
    """Why it is redundant: `cast back`, `cast twice`; None if it is not."""


@dataclass(frozen=True)
class TraceRow:
    """A call of the model with its kernels, or an op outside of a call."""

    op: str
    phase: str
    """One of `PHASES`."""
    module: str
    rule: str
    """The cast rule that decided the dtype."""
    dtypes_in: list[str]
    dtypes_out: list[str]
    kernels: list[str]
    """The ATen ops that computed; empty for a cast alone."""
    began_ms: float
    time_ms: float
    """Without casts."""
    cast_time_ms: float
    casts: list[CastRecord]


@dataclass(frozen=True)
class TraceTotals:
    """Sums over a step."""

    time_ms: float
    by_dtype: dict[str, tuple[int, float]]
    """Output dtype to the number of ops and their time in milliseconds."""
    casts: int
    cast_bytes: int
    cast_time_ms: float
    cast_share: float
    """Of the time of a step that is not traced."""
    redundant: dict[str, int]
    """Kind of redundancy to the number of casts."""


@dataclass(frozen=True)
class TraceRecord:
    """All of it."""

    schema_version: int
    versions: dict[str, str | None]
    hardware: Hardware
    recipe: str
    precision: str
    variant: str
    execution: str
    backend: BackendRow
    step_time_ms: float
    """The median time of a step that is not traced."""
    totals: TraceTotals
    rows: list[TraceRow]
