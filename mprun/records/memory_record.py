"""The content of `memory.json`: the memory of a training step in several modes. No torch.

`docs/reference/memory.md` explains the fields. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mprun.records.run_record import BatchRow

ParallelKind = Literal["ddp", "fsdp2"]


@dataclass(frozen=True)
class ProcessLayout:
    """How many processes share a step, and how."""

    world_size: int = 1
    parallel: ParallelKind | None = None
    """None in a single process."""
    checkpointing: bool = False
    """Whether activations of blocks are recomputed in the backward pass."""


@dataclass(frozen=True)
class MemoryPeak:
    """Where the most memory is alive."""

    point: int
    """The op's index in the timeline."""
    op: str
    phase: str
    module: str


@dataclass(frozen=True)
class ModuleMemory:
    """The memory of a module at the peak."""

    module: str
    kind: str
    """The module's class; empty for `(inputs)`, `(loss)` and `(optimizer)`."""
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
class LargestBatch:
    """The largest batch whose step fits in a limit."""

    batch_size: int
    """0 if one sample does not fit."""
    peak_bytes: int | None
    next_peak_bytes: int | None
    """Of a batch with one sample more."""
    tried: dict[str, int]
    """Batch size to peak."""
    grows: bool
    """Whether the peak grows with every sample; if not, a larger batch may fit."""
    ratio: float | None = None
    """Over the first mode's batch size."""


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer and its implementation."""

    name: str
    impl: str


@dataclass(frozen=True)
class ModeMemory:
    """A step in one mode."""

    label: str
    precision: str
    policy: dict[str, Any]
    batch: BatchRow
    optimizer: OptimizerChoice
    memory_format: str
    bytes: dict[str, int]
    """`peak` and `run_record.MEMORY_CATEGORIES` to bytes at the peak."""
    peak_at: MemoryPeak
    phase_peaks: dict[str, int]
    """Phase to the most bytes alive in it."""
    modules: list[ModuleMemory]
    largest: list[StorageMemory]
    timeline: MemoryTimeline
    fits: LargestBatch | None
    """None without a limit."""
    why_real: str | None = None
    """Why the step ran on real tensors; None for fake ones."""
    ratio: float | None = None
    """Peak over the first mode's peak."""
    same_as: str | None = None
    """The label of a mode before it whose step has the same tensors; it was counted once."""


@dataclass(frozen=True)
class PublishedMemory:
    """A published ratio beside the one counted here."""

    recipe: str
    precision: str
    against: str
    batch_size: int
    ratio: float
    source: str
    ratio_here: float


@dataclass(frozen=True)
class MemoryRecord:
    """All of it."""

    schema_version: int
    recipe: str
    device: str
    versions: dict[str, str | None]
    against: str
    """The label of the first mode, which the others are compared with."""
    limit: str | None
    """`memory.fits` as the user wrote it."""
    limit_bytes: int | None
    published: PublishedMemory | None
    modes: list[ModeMemory]
    layout: ProcessLayout = ProcessLayout()
    """All sizes are those of one of its processes."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Modes that `precision=all` leaves out, with the reason."""
