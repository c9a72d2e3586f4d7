"""What looks for floating-point exceptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mprun.assemble.plan import Plan
from mprun.config.schema import FpExceptions as Action
from mprun.numerics.exceptions import (
    Exceptions,
    FpException,
    FpExceptions,
    NoExceptions,
    Outcome,
)


def build_exceptions(
    chosen: Plan, tell: Callable[[Outcome, Sequence[FpException]], None]
) -> Exceptions:
    """What `debug.fp_exceptions` asks for; `tell` hears of each step that had any."""
    debug = chosen.config.debug
    if debug.fp_exceptions is Action.off:
        return NoExceptions()
    saturates = chosen.policy.overflow == "saturate"
    return FpExceptions(debug.fp_exceptions.name, debug.halt_after, saturates, tell)
