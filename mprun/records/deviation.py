"""The distance of loss and gradients in a low precision from float32's, as recorded.

It is part of `search_ops.json` and of `numerics.json`. Floats may be infinite or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deviation:
    """The distance from float32 of a loss and of gradients."""

    loss_difference: float
    """Relative difference of the loss; infinite or NaN if a loss is."""
    gradients_db: float
    """SQNR of all judged gradients as one vector, in dB; NaN if a gradient is not finite."""
    worst_db: float
    """The lowest SQNR of a parameter's gradient, in dB; NaN as above."""
    worst_parameter: str
    """The parameter with that SQNR; empty if a loss is not finite."""
    loss_scale: float
    """The smallest loss scale that was used on any batch."""
    failure: str = ""
    """Why nothing could be measured: an op has no kernel for its dtypes."""
    loss_beyond: float | None = None
    """The loss difference minus the difference between batches; None if that is unknown."""
    beyond_db: float | None = None
    """The lowest SQNR of a parameter if only the error counts that is larger than the difference
    between batches (`numerics/tolerance.py`); None if that difference is unknown."""
    beyond_parameter: str = ""
    """The parameter with that SQNR."""

    @property
    def judged_loss(self) -> float:
        """The loss difference that is compared with the tolerance."""
        return self.loss_difference if self.loss_beyond is None else self.loss_beyond

    @property
    def judged_db(self) -> float:
        """The SQNR that is compared with the tolerance."""
        return self.worst_db if self.beyond_db is None else self.beyond_db


@dataclass(frozen=True)
class Reference:
    """The reference that shows which float32 gradients are only rounding errors."""

    name: str
    """float64, or float32 with moved weights."""
    reason: str = ""
    """Why it is not float64."""


@dataclass(frozen=True)
class SearchTolerance:
    """The distance from float32 that was allowed."""

    loss: float
    """Relative difference of the loss."""
    gradient_db: float | None
    """Lowest SQNR of a parameter's gradient, in dB; None if only the loss was judged."""
