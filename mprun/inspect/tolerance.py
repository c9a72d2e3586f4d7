"""The distance from float32 that a 16-bit dtype may have: the one criterion of every command.

The size of an error is its SQNR (`precision/rounding.py`).

Two kinds of error are tolerated in any case.

*Rounded weights.* Weights of the dtype's precision alone move loss and gradients
(`CastProbe.unavoidable`); no choice of ops could do better.

*The noise of batches.* A batch is a sample, and its gradient differs from that of all data by more
than a tenth as a rule, late in a training by more than all of it. A rounding error that is no
larger adds to that noise and costs little. So of an error

    along the gradient     nothing is tolerated: a value flushed to 0 is lost at every step
    in other directions    `SHARE` times the variance over batches is tolerated

The figures come from training a layer for which 16 bits are too coarse, with growing offsets of its
inputs (benchmarks/sampling_noise.py). The tolerated error costs up to 3 points of accuracy; two to
four times its power costs 2 to 10 points, more than that 10 to 38. The tolerated error of the loss
costs up to 3 points, more than twice as much costs 10 and more. The SQNR alone cannot separate
these cases: it falls by 20 dB during a training, because gradients become smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NEEDED_DB = 20.0  # Lowest SQNR of a parameter's gradient: its error is then a tenth of it
# How much worse than weights of its precision alone a dtype may be, whatever else is asked
SLACK_DB = 10.0
SHARE = 2.0  # Power of tolerated errors over the variance over batches
DEVIATIONS = 2.0  # Of a loss: how many standard deviations over batches are tolerated
MIN_KEPT = 0.5  # The share of the gradient that must be left for anything to be tolerated
# Power of an error over that of the gradient from which nothing is tolerated: small batches and
# dropout differ by so much that every error would be
MOST = 0.5
MAX_LOSS = 0.12  # Share of the loss beyond which nothing is tolerated


@dataclass(frozen=True)
class Deviation:
    """The distance from float32 of a loss and of gradients; its floats may be infinite or NaN."""

    loss_difference: float  # Relative difference of the loss; infinite or NaN if a loss is
    gradients_db: float
    """SQNR of all judged gradients as one vector, in dB; NaN if a gradient is not finite."""
    worst_db: float  # The lowest SQNR of a parameter's gradient, in dB; NaN as above
    worst_parameter: str  # The parameter with that SQNR; empty if a loss is not finite
    loss_scale: float  # The smallest loss scale that was used on any batch
    failure: str = ""  # Why nothing could be measured: an op has no kernel for its dtypes
    loss_beyond: float | None = None
    """The loss difference minus the difference between batches; None if that is unknown."""
    beyond_db: float | None = None
    """The lowest SQNR of a parameter if only the error counts that is larger than the difference
    between batches; None if that difference is unknown."""
    beyond_parameter: str = ""  # The parameter with that SQNR
    quantities_db: dict[str, float] = field(default_factory=dict)
    """The SQNR of each quantity of the recipe against float64, in dB."""

    @property
    def judged_loss(self) -> float:
        """The loss difference that is compared with the tolerance."""
        return self.loss_difference if self.loss_beyond is None else self.loss_beyond

    @property
    def judged_db(self) -> float:
        """The SQNR that is compared with the tolerance."""
        return self.worst_db if self.beyond_db is None else self.beyond_db


@dataclass(frozen=True)
class Tolerance:
    """The distance from float32 that the lower dtype may have: `Tolerance(loss=0.02)`.

    Where weights of its precision are further away by themselves, no list of ops could keep to it:
    then `SLACK_DB` more than those is tolerated.
    """

    loss: float = 0.01
    """Relative difference of the loss."""
    gradient_db: float | None = NEEDED_DB
    """Lowest SQNR of any parameter's gradient, in dB: at 20 its error is a tenth of it. None judges
    the loss and quantities alone."""
    quantity_db: float = NEEDED_DB
    """The same of each quantity of the recipe."""

    def beside(self, unavoidable: Deviation, slack_db: float = SLACK_DB) -> Tolerance:
        """The same, and at least `CastProbe.unavoidable` and `slack_db` worse than it."""
        loss = max(self.loss, unavoidable.loss_difference * 10 ** (slack_db / 20))
        found = [db - slack_db for db in unavoidable.quantities_db.values()]
        quantity_db = min([self.quantity_db, *found])
        if self.gradient_db is None:
            return Tolerance(loss, None, quantity_db)
        gradient_db = min(self.gradient_db, unavoidable.worst_db - slack_db)
        return Tolerance(loss, gradient_db, quantity_db)

    def harm(self, measure: Deviation) -> float:
        """The share of the tolerance that `measure` uses up: 1 is all; infinite for NaN."""
        harms = [measure.judged_loss / self.loss]
        if self.gradient_db is not None:
            harms.append(10 ** ((self.gradient_db - measure.judged_db) / 20))
        harms += [10 ** ((self.quantity_db - db) / 20) for db in measure.quantities_db.values()]
        return math.inf if any(map(math.isnan, harms)) else max(harms)


DEFAULT = Tolerance()  # The tolerance unless another is asked for


def gradient_error(error: float, signal: float, product: float, variance: float) -> float:
    """The power of a gradient's error beyond the noise of batches.

    Args:
        error: its power; infinite or NaN where a gradient is not finite.
        signal: the power of the exact gradient.
        product: the scalar product of the measured and the exact gradient.
        variance: the power of the difference of exact gradients between batches.
    """
    if not error <= MOST * signal or not product >= MIN_KEPT * signal:
        return error
    return max(0.0, error - SHARE * variance)


def loss_shares(change: float, whole: float, deviation: float) -> tuple[float, float]:
    """The error of a loss as a share of it: all of it, and what is beyond the noise of batches.

    Args:
        change: the absolute error; it may be infinite or NaN.
        whole: the absolute loss.
        deviation: the standard deviation of the loss over batches.
    """
    beyond = change
    if math.isfinite(change):
        beyond = max(0.0, change - min(DEVIATIONS * deviation, MAX_LOSS * whole))

    def share(x: float) -> float:
        return 0.0 if x == 0 else x / whole if whole else math.inf

    return share(change), share(beyond)
