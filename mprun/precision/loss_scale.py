"""Loss scales: keeping small gradients representable.

In float16 a gradient below 2^-24 becomes 0. Multiplying the loss by S multiplies every gradient by
S (the chain rule is linear), so they are computed S times larger and divided by S before the
optimizer sees them (Micikevicius et al., "Mixed Precision Training", 2018). float32 and bfloat16
share an exponent range that needs none of it: their loss scale is the no-op below.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LossScale(Protocol):
    """How a loss is scaled; see the module's text."""

    kind: str
    """none, static or dynamic."""

    @property
    def value(self) -> float:
        """The current factor; 1 where nothing is scaled."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss the backward pass starts from."""


class NoLossScale:
    """The loss as it is."""

    kind = "none"
    value = 1.0

    def scale(self, loss: Tensor) -> Tensor:
        return loss
