"""The least time of a recipe's step on a machine, beside the measured one. No torch.

A part of the record of `mprun doctor recipe=NAME`. What was not measured is null.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
