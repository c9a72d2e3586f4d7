"""What a gradient differs from one batch to the next, beside which a rounding error is judged.

A batch is a sample, and its gradient is off from that of all data by more than a tenth as a rule,
late in a training by more than all of it. An error of rounding that is no larger adds to that noise
and costs little. So of an error

    along the gradient     nothing is forgiven: what a format flushes to 0 is lost at every step
    in other directions    as much is as `SHARE` times the variance over batches

A layer that 16 bits are too coarse for was trained with inputs ever further off, and what it lost
set beside these figures (benchmarks/sampling_noise.py): as much as is forgiven costs up to 3 points
of accuracy; twice to four times the power 2 to 10, more than that 10 to 38. Of the loss as much as
is forgiven costs up to 3 points, more than twice as much 10 and more. The signal-to-noise ratio
alone cannot tell them apart: it falls by 20 dB in a training, because gradients do.
"""

from __future__ import annotations

import math

SHARE = 2.0
"""Power of forgiven errors over the variance over batches."""
DEVIATIONS = 2.0
"""Of a loss: how many standard deviations over batches are forgiven."""
KEPT = 0.5
"""Which share of the gradient has to be left for anything to be forgiven."""
MOST = 0.5
"""Power of an error over that of the gradient from which nothing is forgiven: small batches and
dropout differ by so much that everything would be."""
MOST_LOSS = 0.12
"""Share of the loss beyond which nothing is forgiven."""


def gradient_error(error: float, signal: float, product: float, variance: float) -> float:
    """The power of a gradient's error beyond what is forgiven.

    Args:
        error: its power; infinite or NaN where a gradient is not finite.
        signal: the power of the exact gradient.
        product: the scalar product of what was found and the exact gradient.
        variance: the power of what the exact gradient differs from one batch to the next.
    """
    if not error <= MOST * signal or not product >= KEPT * signal:
        return error
    return max(0.0, error - SHARE * variance)


def loss_error(error: float, loss: float, deviation: float) -> float:
    """The same of a loss, of which the standard deviation over batches is given."""
    if not math.isfinite(error):
        return error
    return max(0.0, error - min(DEVIATIONS * deviation, MOST_LOSS * loss))
