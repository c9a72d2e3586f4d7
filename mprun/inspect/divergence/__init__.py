"""Where two models part: two precisions, versions, devices, compiled and eager.

boundaries      what enters and leaves each module of a side, forward and backward
exact           a model in float64 whose casts do nothing, and whose results may be rounded
pieces          each module's own code in float64, on the very numbers that a side gave it
ops             the error that arises in each op
sides           a model, its step on the batch
comparison      the errors of both sides, and what their dtypes explain
rows            the result, and the first row beyond that
"""

from mprun.inspect.divergence.pieces import Difference, DifferenceRow
from mprun.inspect.divergence.side_by_side import Side, diff

__all__ = ["Difference", "DifferenceRow", "Side", "diff"]
