"""Where two models part: two precisions, versions, devices, compiled and eager.

boundaries      what enters and leaves each module of a side; each module's own code in float64, on
                the same numbers that a side gave it; errors of ops
side_by_side    a side, its step on the batch, its errors with their bounds; `diff` and its result
compiled        boundaries inside compiled code, its kernels and lines
runs            runs as sides: `mprun diff`
"""

from mprun.inspect.divergence.side_by_side import Difference, DifferenceRow, Side, diff

__all__ = ["Difference", "DifferenceRow", "Side", "diff"]
