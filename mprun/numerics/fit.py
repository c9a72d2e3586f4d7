"""The largest batch whose peak fits: a search over a function that grows with the batch.

The peak of a step is nearly a straight line in the batch size: parameters and state, plus a
constant number of bytes per sample. So the search guesses along the line through two measured
sizes. Then it tries the two sizes that prove the result: one that fits, and the next one that does
not. Where the line bends, because another moment of the step becomes the peak, guesses that make
little progress alternate with halving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LargestFit:
    """The result of the search."""

    size: int
    """The largest that fits; 0 where not even 1 does."""
    tried: Mapping[int, int]
    """Size to peak, in bytes."""

    @property
    def grows(self) -> bool:
        """Whether no larger size that was tried took less than a smaller one."""
        peaks = [peak for _, peak in sorted(self.tried.items())]
        return peaks == sorted(peaks)


def largest(peak: Callable[[int], int], limit: int, start: int) -> LargestFit:
    """The largest size whose peak is at most `limit`, and that the next one's is not.

    Sizes beyond `limit` are not tried: a sample takes a byte or more.

    Args:
        peak: size (1 or more) to peak, in bytes; should grow with it (`LargestFit.grows`).
        limit: bytes.
        start: the size to try first.
    """
    tried: dict[int, int] = {}
    low, high = 0, limit + 1  # low fits, high does not
    guess, halve = min(start, limit), False
    while True:
        gap, tried[guess] = high - low, peak(guess)
        low, high = (guess, high) if tried[guess] <= limit else (low, guess)
        if high - low == 1:
            return LargestFit(low, tried)
        halve = not halve and high in tried and low in tried and 2 * (high - low) > gap
        middle = (low + high) // 2 if high in tried else 2 * low
        line = None if halve else _on_line(tried, limit, low, high)
        guess = min(max(middle if line is None else line, low + 1), high - 1)


def _on_line(tried: Mapping[int, int], limit: int, low: int, high: int) -> int | None:
    """Where the line through two tried sizes meets `limit`; None where there is no such place."""
    sizes = sorted(tried)
    if low in tried and high in tried:
        a, b = low, high
    elif len(sizes) > 1:  # all fit, or none: on from the two that are nearest
        a, b = sizes[-2:] if low in tried else sizes[:2]
    else:
        return None
    rise = tried[b] - tried[a]
    return a + (limit - tried[a]) * (b - a) // rise if rise > 0 else None
