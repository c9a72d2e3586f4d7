"""How far from float32 a 16-bit dtype may lead: the one criterion of every command.

What weights of the dtype's precision do by themselves is tolerated in any case (`Probe.unavoidable`
in probe.py): no choice of ops could do better. So is an error no larger than what gradients and
losses differ by from one batch to the next (`sampling.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mprun.numerics.probe import Measure

NEEDED_DB = 20.0
"""Least SQNR of a parameter's gradient: its error is then a tenth of it."""
SLACK_DB = 10.0
"""How much worse than weights of its precision alone a dtype may be, whatever else is asked."""


@dataclass(frozen=True)
class Tolerance:
    """How far from float32 the lower dtype may lead.

    Where weights that have its precision lead further than that by themselves, no list of ops could
    keep to it: then `SLACK_DB` more than those is tolerated.
    """

    loss: float = 0.01
    """Relative difference of the loss."""
    gradient_db: float | None = NEEDED_DB
    """Least SQNR of any parameter's gradient, in dB: at 20 its error is a tenth of it. None to look
    at the loss alone."""

    def beside(self, unavoidable: Measure) -> Tolerance:
        """This, and at least what goes with `Probe.unavoidable`."""
        loss = max(self.loss, unavoidable.loss_difference * 10 ** (SLACK_DB / 20))
        if self.gradient_db is None:
            return Tolerance(loss, None)
        return Tolerance(loss, min(self.gradient_db, unavoidable.worst_db - SLACK_DB))

    def harm(self, measure: Measure) -> float:
        """How much of what is tolerated is used up: 1 is all; infinite where a number is none."""
        harms = [measure.judged_loss / self.loss]
        if self.gradient_db is not None:
            harms.append(10 ** ((self.gradient_db - measure.judged_db) / 20))
        return math.inf if any(map(math.isnan, harms)) else max(harms)


DEFAULT = Tolerance()
"""What is tolerated unless something else is asked for."""
