"""Gradient clipping. It acts on unscaled gradients: `Precision.step` fixes the order."""

from __future__ import annotations

from typing import Protocol

from torch import nn
from torch.optim import Optimizer


class Clip(Protocol):
    """Changes the gradients of an optimizer's parameters in place."""

    @property
    def max_norm(self) -> float | None:
        """The largest global L2 norm that passes; None for any."""

    def __call__(self, optimizer: Optimizer) -> None:
        """Clip."""


class NoClip:
    """Gradients as they are."""

    max_norm: float | None = None

    def __call__(self, optimizer: Optimizer) -> None:
        pass


class ClipNorm:
    """Scale all gradients so that their global L2 norm is at most `max_norm`."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def __call__(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self.max_norm)
