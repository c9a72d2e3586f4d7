"""What is measured in a step: parts of the records of `mprun memory` and `mprun numerics`.

The room `watch` makes them while a step runs, and `inspect` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParallelKind = Literal["ddp", "fsdp2"]


@dataclass(frozen=True)
class ProcessLayout:
    """How many processes share a step, and how."""

    world_size: int = 1
    parallel: ParallelKind | None = None  # None in a single process
    checkpointing: bool = False  # Whether activations of blocks are recomputed in the backward pass


@dataclass(frozen=True)
class MemoryPeak:
    """Where the most memory is alive."""

    point: int  # The op's index in the timeline
    op: str
    phase: str
    module: str


@dataclass(frozen=True)
class ModuleMemory:
    """The memory of a module at the peak."""

    module: str
    kind: str  # The module's class; empty for `(inputs)`, `(loss)` and `(optimizer)`
    total: int
    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: int
    temporary: int


@dataclass(frozen=True)
class StorageMemory:
    """One of the largest storages at the peak."""

    bytes: int
    category: str
    module: str
    shape: list[int]
    dtype: str


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive after each op; all lists have the same length."""

    op: list[str]
    phase: list[str]
    module: list[str]
    parameters: list[int]
    buffers: list[int]
    gradients: list[int]
    optimizer_state: list[int]
    activations: list[int]
    temporary: list[int]


@dataclass(frozen=True)
class Float32Gradients:
    """All gradients of float32, beside float64's of the same model."""

    db: float  # The SQNR of all together
    worst: str  # The parameter with the most of the error


@dataclass(frozen=True)
class LostShares:
    """The shares of updates that weights in 16 bits would lose, by format and rounding rule."""

    updated: int  # Updates that are not zero
    lost_in_run: float | None  # The share that the run lost
    fp16: dict[str, float | None]
    bf16: dict[str, float | None]


@dataclass(frozen=True)
class Reference:
    """The reference that shows which float32 gradients are only rounding errors."""

    name: str  # float64, or float32 with moved weights
    reason: str = ""  # Why it is not float64
