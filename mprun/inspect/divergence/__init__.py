"""Where two models part: two precisions, versions, devices, compiled and eager.

boundaries      what enters and leaves each module of a side; float64 without casts; errors of ops
forced_run      each module's own code in float64, on the same numbers that a side gave it
side_by_side    a side, its step on the batch, its errors with their bounds; `diff`
difference      the result: both sides' errors by module, and the first row beyond its bound
"""

from mprun.inspect.divergence.difference import Difference, DifferenceRow
from mprun.inspect.divergence.side_by_side import Side, diff

__all__ = ["Difference", "DifferenceRow", "Side", "diff"]
