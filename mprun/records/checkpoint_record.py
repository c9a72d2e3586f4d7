"""The plain values of a checkpoint that a run needs before it is assembled again. No torch.

A checkpoint is read with `weights_only=True`, so it runs no code; but any value in it can have any
type. What the run's parts make of the rest is theirs: `train/checkpoint.py` names the misfit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Fallback = Literal["none", "backward", "all"]


@dataclass(frozen=True, kw_only=True)
class SavedChoices:
    """The automatic choices of the run's machine, which a resumed run repeats."""

    device: str | None = None
    execution: Literal["native", "emulated"] | None = None
    memory_format: Literal["contiguous", "channels_last"]
    optimizer_impl: Literal[
        "forloop", "foreach", "fused", "c", "inductor", "eager", "masters", "own"
    ]
    fp32_fallback: Fallback | None = None
    effective_batch: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Samples of a step over all processes."""


@dataclass(frozen=True, kw_only=True)
class SavedSums:
    """Sums over the samples of the epoch so far."""

    epoch: Count
    loss: float
    correct: Count | None
    samples: Count
    weight: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SavedMetrics:
    """The recipe's metrics over the epoch so far."""

    updates: Count
    states: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SavedPosition:
    """Where the loop was."""

    step: Count
    epoch: Count
    in_epoch: bool
    sums: SavedSums
    metrics: SavedMetrics | None = None


@dataclass(frozen=True, kw_only=True)
class SavedJournal:
    """What the record of the run had."""

    steps: Count


@dataclass(frozen=True, kw_only=True)
class SavedShards:
    """Where the tensors are that the processes have cut."""

    folder: Annotated[str, msgspec.Meta(pattern=r"^shards-[0-9]+$")]  # Beside the checkpoint's file
    tied: dict[str, str]  # Other names of a shard, to the name in the files


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What of a checkpoint decides how the run is assembled."""

    format_version: int
    choices: SavedChoices
    trainer: SavedPosition
    journal: SavedJournal
    shards: SavedShards | None = None
