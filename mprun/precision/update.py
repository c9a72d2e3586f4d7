"""The optimizer's step on scaled gradients: unscale, check, clip, step, in that order.

PyTorch's optimizers get their gradients unscaled and clipped in place, in float32. One that keeps
16-bit parameters (`mprun.optim`) has 16-bit gradients, which in-place unscaling would flush to
zero: it takes them as they are and does all of it in float32 during its own pass.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from mprun._torch import step_unless, unscale_and_check
from mprun.precision.clip import Clip


@runtime_checkable
class ScaledOptimizer(Protocol):
    """An optimizer that steps on gradients of a scaled loss."""

    def scaled_step(self, scale: Tensor | None, max_norm: float | None) -> Tensor | None:
        """Unscale by `scale`, check, clip to `max_norm`, step; 1 where it was skipped, else 0."""


def update(optimizer: Optimizer, scale: Tensor | None, clip: Clip) -> Tensor | None:
    """One step.

    Args:
        optimizer: its parameters' gradients are those of the loss times `scale`.
        scale: float32 scalar; None where the loss was not scaled and no step is ever skipped.
        clip: what limits the unscaled gradients.

    Returns:
        1 where a gradient was not finite and the step was skipped, else 0, a float32 scalar on the
        device; None where `scale` is None.
    """
    if isinstance(optimizer, ScaledOptimizer):
        return optimizer.scaled_step(scale, clip.max_norm)
    if scale is None:
        clip(optimizer)
        optimizer.step()
        return None
    overflow = unscale_and_check(optimizer, scale)
    clip(optimizer)
    step_unless(optimizer, overflow)
    return overflow
