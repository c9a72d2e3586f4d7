"""The largest batch that fits: found by trying, kept away from the edge, and proved.

Memory is not a function of the batch alone: allocators keep blocks, libraries take workspace, and
later steps may need more than the first. So the search ends with a margin, and the batch that
comes out is run for `PROOF_STEPS` steps. An overflow has no size, so there is no line to guess
along as in `numerics/fit.py`, which counts on fake tensors: this one halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mprun.errors import UsageError

Fits = Callable[[int, int], bool]
"""Whether a batch of the first trains for the second number of steps."""

TRY_STEPS = 3
"""Optimizer state exists from the second step on."""
PROOF_STEPS = 20


@dataclass(frozen=True)
class Largest:
    """What was found."""

    found: int
    """The largest batch that trained for a few steps."""
    recommended: int
    """With the margin taken off, proved by `PROOF_STEPS` steps."""
    is_limited_by_data: bool
    """Whether the training set ended before the memory did."""


def largest_that_fits(fits: Fits, start: int, limit: int, margin: float) -> Largest:
    """Doubling until it fails, then halving the interval.

    Args:
        fits: runs steps.
        start: the first batch tried.
        limit: the largest there can be: the training set's size.
        margin: share taken off what was found, 0 to 1.

    Raises:
        UsageError: not even `start` fits, or nothing could be proved.
    """
    start = min(start, limit)
    if not fits(start, TRY_STEPS):
        raise UsageError(
            f"train.batch_size={start} does not fit; begin the search with a smaller one"
        )
    low = start
    while low < limit and fits(min(2 * low, limit), TRY_STEPS):
        low = min(2 * low, limit)
    high = min(2 * low, limit)
    is_limited = low == limit
    while not is_limited and high - low > max(1, low // 64):
        middle = (low + high) // 2
        if fits(middle, TRY_STEPS):
            low = middle
        else:
            high = middle
    return Largest(low, _proved(fits, low, start, 0.0 if is_limited else margin), is_limited)


def _proved(fits: Fits, found: int, start: int, margin: float) -> int:
    """The recommended batch, made smaller until it holds."""
    batch = max(start, int(found * (1 - margin)))
    while not fits(batch, PROOF_STEPS):
        if batch == start:
            raise UsageError(
                f"train.batch_size={start} fits for {TRY_STEPS} steps and not for {PROOF_STEPS}"
            )
        batch = max(start, int(batch * 0.9))
    return batch
