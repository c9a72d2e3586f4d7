"""Floating-point exceptions: which op first made a NaN or an infinity.

A loss of NaN shows that something went wrong, often many ops and steps earlier. So each op of the
forward pass, loss and backward pass is inspected when it runs, and the state after the step. An op
that reads finite numbers and makes others is the origin; later NaN and infinities lead back to it.

    fp_exception       the results as plain data: exceptions, verdicts, counts
    nonfinite_watcher  the mode that sees every op, and whether it is an origin, a consequence, or a
                       constant like a mask's -inf; which gradients, weights and state it reached
    step_monitor       the verdict of a step, and the response: log, halt, skip; the two entries:
                       any training loop, and mprun's run
    saved_step         what a step needs to run again, remembered in a loop that is not inspected,
                       and written as a file
    step_replay        that step run again, with every op inspected
"""

from mprun.watch.nonfinite.fp_exception import FpException, NonfiniteReport, finding_lines
from mprun.watch.nonfinite.step_monitor import (
    FpExceptionError,
    RunExceptions,
    StepOutcome,
    WatchedRunExceptions,
    fp_exceptions,
)

__all__ = [
    "FpException",
    "FpExceptionError",
    "NonfiniteReport",
    "RunExceptions",
    "StepOutcome",
    "WatchedRunExceptions",
    "finding_lines",
    "fp_exceptions",
]
