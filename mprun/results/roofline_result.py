"""The least time of a recipe's step on a machine, beside the measured one. No torch.

A part of the record of `mprun doctor recipe=NAME`, and its table. What was not measured is null.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.console.formatting import significant, size_text
from mprun.records.run_record import StepTimes

GroupName = Literal["matmul", "convolution", "cast", "memory-bound", "optimizer"]
Traffic = Literal["copy", "read", "write"]

GROUPS: tuple[GroupName, ...] = ("matmul", "convolution", "cast", "memory-bound", "optimizer")


@dataclass(kw_only=True)
class Bandwidth:
    """The fastest traffic between a core and a working set of one size."""

    bytes: int
    """The working set: it is touched again and again, so it stays in the caches if it fits."""
    gigabytes_per_second: float
    """10^9 bytes read and written per second."""
    by: Traffic
    """Which of the three was the fastest."""


@dataclass(kw_only=True)
class RoofGroup:
    """The ops of one kind in a step."""

    name: GroupName
    ops: int
    flops: int
    """Multiplications and additions of matrix products and convolutions."""
    bytes: int
    """Read and written."""
    least_ms: float
    measured_ms: float | None
    """The sum over its ops, each timed by itself."""


@dataclass(kw_only=True)
class Roofline:
    """The least time of a step, and the share of it that the step reaches."""

    recipe: str
    precision: str
    variant: str
    execution: str
    """native or emulated."""
    batch_size: int
    gflops: dict[str, float]
    """Number format to the rate that its products are held against, 10^9 operations a second."""
    bandwidths: list[Bandwidth]
    groups: list[RoofGroup]
    least_ms: float
    """Each op as a kernel of its own: the sum over ops."""
    fused_ms: float
    """Casts and memory-bound ops fused into the products: the sum over products and optimizer."""
    why_real: str | None
    """Why ops were counted in a real step; null for fake tensors."""
    step_time_ms: StepTimes
    share: float | None
    """`least_ms` over the median step."""
    outside_ms: float | None
    """The median step less its ops: Python, autograd, and on a GPU the launches."""
    page_faults: float | None
    """Per step."""
    page_faults_ms: float | None
    """At the price that the record's `hardware` has."""
    notes: list[str]
    """What holds the rest, a sentence each."""


ELSEWHERE = "the output of doctor.json=true"
BY_GROUP: dict[str, str] = {
    "matmul": "matrix products",
    "convolution": "convolutions",
    "cast": "casts",
    "memory-bound": "memory-bound ops",
    "optimizer": "optimizer, in one pass",
}


def roofline_parts(roof: Roofline) -> Iterator[FittedTable | str]:
    """The parts in the order they are shown."""
    yield groups_table(roof)
    yield summary(roof)
    yield from roof.notes


def groups_table(roof: Roofline) -> FittedTable:
    """A row for each group of ops, and one for the step."""
    rows: list[tuple[Any, ...]] = [
        (BY_GROUP[g.name], g.ops, g.flops or None, g.bytes, g.least_ms, g.measured_ms)
        for g in roof.groups
    ]
    ops, flops, nbytes = (
        sum(getattr(g, name) for g in roof.groups) for name in ("ops", "flops", "bytes")
    )
    if roof.outside_ms is not None:
        rows.append(("between ops", None, None, None, None, roof.outside_ms))
    rows.append(("step", ops, flops, nbytes, roof.least_ms, roof.step_time_ms.median))
    rates = ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in roof.gflops.items())
    fastest = max(roof.bandwidths, key=lambda b: b.gigabytes_per_second)
    extremes = (
        f"{b.gigabytes_per_second:.0f} GB/s at {size_text(b.bytes)}"
        for b in (fastest, roof.bandwidths[-1])
    )
    return FittedTable(
        f"least time of a step: {roof.recipe}, {roof.variant}, batch {roof.batch_size}",
        text_column("group", cell=itemgetter(0)),
        figure_column("ops", 1, lambda row: str(row[1] or "")),
        figure_column("GFLOP", 3, lambda row: "" if row[2] is None else f"{row[2] / 1e9:.3g}"),
        figure_column("MB", 2, lambda row: "" if row[3] is None else f"{row[3] / 1e6:.3g}"),
        figure_column("least ms", cell=lambda row: "" if row[4] is None else significant(row[4])),
        figure_column("measured ms", cell=lambda row: significant(row[5])),
        figure_column("share", cell=lambda row: _share(row[4], row[5])),
        rows=rows,
        elsewhere=ELSEWHERE,
        caption=f"rates: {rates or 'no products'}; {' to '.join(extremes)}",
    )


def summary(roof: Roofline) -> str:
    """The share that is reached, and the two bounds."""
    fused = (
        f"{significant(roof.fused_ms)} ms if casts and memory-bound ops are fused into the products"
    )
    times = roof.step_time_ms
    if times.median is None or roof.share is None:
        return f"a step takes at least {significant(roof.least_ms)} ms; {fused}"
    spread = f"{significant(times.p10)}-{significant(times.p90)}"
    text = (
        f"a step takes {significant(times.median)} ms ({spread}, {times.n} steps), at least "
        f"{significant(roof.least_ms)} ms: it reaches {100 * roof.share:.0f} % of the roof; {fused}"
    )
    if roof.page_faults is None:
        return text
    price = "" if roof.page_faults_ms is None else f", {significant(roof.page_faults_ms)} ms"
    return f"{text}; {roof.page_faults:,.0f} page faults a step{price}"


def _share(least_ms: float | None, measured_ms: float | None) -> str:
    if least_ms is None:
        return ""
    return f"{100 * least_ms / measured_ms:.0f} %" if measured_ms else "-"
