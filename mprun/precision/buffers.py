"""Running statistics that an overflow must not spoil.

A step that overflows in the forward pass writes infinities and NaN into BatchNorm's running mean
and variance; skipping the optimizer step does not undo that, and every later evaluation is NaN. So
a floating buffer is put back to its value before the step if, and only if, it became non-finite:
where the overflow is in the backward pass alone, the statistics of the forward pass are good and
are kept.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class BufferGuard(Protocol):
    """Looks after buffers around a step."""

    def before(self) -> None:
        """A step begins."""

    def after(self) -> None:
        """A step ended."""


class NoBufferGuard:
    """Nothing to look after: no step is ever skipped, or there are no floating buffers."""

    def before(self) -> None:
        pass

    def after(self) -> None:
        pass


class FiniteBuffers:
    """Puts buffers that became non-finite back, without a host synchronization."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._saved: list[Tensor] = []

    def before(self) -> None:
        self._saved = [b.clone() for b in self._buffers]

    def after(self) -> None:
        for buffer, saved in zip(self._buffers, self._saved, strict=True):
            buffer.copy_(torch.where(torch.isfinite(buffer).all(), buffer, saved))


def guard_for(model: nn.Module, skips: bool) -> BufferGuard:
    """The guard for a model whose steps may (`skips`) be skipped."""
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return FiniteBuffers(buffers) if skips and buffers else NoBufferGuard()
