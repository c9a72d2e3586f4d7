"""An estimate of a recipe's step on several processes. No torch.

A part of the record of `mprun doctor recipe=NAME doctor.world_size=N`. Nothing of it was measured
but the step of a single process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mprun.records.memory_record import ParallelKind


@dataclass(kw_only=True)
class LinkEstimate:
    """A step where all processes are connected by one kind of link."""

    link: str
    gigabytes_per_second: float
    """10^9 bytes a second, of a process in one direction."""
    source: str
    communication_ms: float
    overlapped_ms: float
    """A step whose communication runs beside the computation as far as possible."""
    sequential_ms: float
    """A step whose communication and computation run one after the other."""
    share: float
    """Of communication in the sequential step."""


@dataclass(kw_only=True)
class ScalingEstimate:
    """A step of each of several processes, each with its own batch."""

    estimate: bool
    """True: these times were computed, not measured."""
    world_size: int
    parallel: ParallelKind
    compute_ms: float
    compute_from: Literal["measured step", "least time"]
    """What `compute_ms` is: the median step measured here, or the roofline's least time."""
    gather_dtype: str | None
    """Of gathered parameters; null for ddp."""
    reduce_dtype: str
    """Of gradients that are averaged."""
    sent_bytes: int
    """What each process sends in a step."""
    links: list[LinkEstimate]
    enough_gigabytes_per_second: float
    """With this bandwidth, communication takes a fifth of a sequential step."""
    enough_link: str | None
    """The slowest link of the table that has it; null if none has."""
    assumptions: str
