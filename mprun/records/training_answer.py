"""An answer of `mprun advise` as plain data: how to train, in which precision.

`mprun.study.report.snippets` writes it as code for other training loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScaleAnswer:
    """The loss scale."""

    kind: str  # none, static or dynamic
    value: float  # The static factor, or the initial one
    growth_factor: float
    backoff_factor: float
    growth_interval: int


@dataclass(frozen=True)
class ListsAnswer:
    """Ops cast by name: `mprun.precision.op_lists`."""

    lower: tuple[str, ...]
    fp32: tuple[str, ...]
    promote: tuple[str, ...]
    first_input: bool


@dataclass(frozen=True, kw_only=True)
class TrainingAnswer:
    """Everything that code for another loop needs."""

    title: str  # `bf16_sr for recipe mnist`
    notes: tuple[str, ...]  # Where it comes from: comments at the top of the code
    device: str  # What it was measured on: cpu or cuda
    execution: str  # native or emulated
    mode: str  # The mode's name
    columns: Mapping[str, Any]  # The whole row of the mode, without its name
    is_shipped: bool  # Whether `mprun.policy(mode)` exists
    changes: Mapping[str, Any]  # Columns that differ from those of the shipped mode
    lists: ListsAnswer | None
    layers: Mapping[str, str]  # Modules in a precision of their own
    scale: ScaleAnswer
    optimizer: str | None
    """The import path of PyTorch's or another class; None: the recipe makes its own."""
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)  # Without `lr`
    lr: float
    clip_norm: float | None
    compile: bool = False
    left_out: tuple[str, ...] = ()
    """Parts of the training that the code does not contain: `train.accumulate=4`."""

    @property
    def stores_low(self) -> bool:
        """Whether parameters or moments have 16 bits, so that the optimizer has to round."""
        stored = ("param_dtype", "momentum_dtype", "variance_dtype")
        return any(self.columns[key] != "float32" for key in stored)

    @property
    def casts(self) -> bool:
        """Whether ops cast their inputs."""
        return bool(self.columns["casting"] != "none")
