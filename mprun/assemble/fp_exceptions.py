"""What a run does about floating-point exceptions."""

from __future__ import annotations

from collections.abc import Callable

from mprun.assemble.plan import Plan
from mprun.config.schema import FpExceptions
from mprun.numerics.nonfinite import RunExceptions, StepOutcome, WatchedRunExceptions


def build_exceptions(plan: Plan, on_step_end: Callable[[StepOutcome], None]) -> RunExceptions:
    """What `debug.fp_exceptions` asks for; `on_step_end` is called after each inspected step."""
    debug = plan.config.debug
    if debug.fp_exceptions is FpExceptions.off:
        return RunExceptions()
    saturates = plan.policy.overflow == "saturate"
    return WatchedRunExceptions(debug.fp_exceptions.name, debug.halt_after, saturates, on_step_end)
