"""Floating-point exceptions: which op first made a NaN, an infinity or a saturated number.

A loss of NaN shows that something went wrong, often many ops and steps earlier. So each op is
inspected when it runs, in forward pass, loss, backward pass and optimizer. An op that reads finite
numbers and makes others is the origin of an exception. Later NaN and infinities lead back to it.

    fp_exception       the results as plain data: exceptions, verdicts, counts
    op_call            what an op reads and writes, its range of values, the op again in float64
    shadow             which origin spoiled which memory, and the exact numbers
    origins            whether an op is an origin, a consequence, or a constant like a mask's -inf,
                       and whether it reached the loss
    nonfinite_watcher  the mode that meets every op, and the line of Python the op is from
    step_monitor       which gradients, weights, buffers and state it reached (`StateCheck`), the
                       step's verdict and the response: log, halt, skip
    loops              the two entries: any training loop, and mprun's run
    step_capture       what a step needs to run again, remembered in a loop that is not inspected
    saved_step         that step as a file
    step_replay        that step run again, with every op inspected
"""

from mprun.numerics.nonfinite.fp_exception import FpException, NonfiniteReport, finding_lines
from mprun.numerics.nonfinite.loops import (
    FpExceptionError,
    RunExceptions,
    WatchedRunExceptions,
    fp_exceptions,
)
from mprun.numerics.nonfinite.step_monitor import StepOutcome

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
