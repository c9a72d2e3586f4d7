"""Floating-point exceptions: which op first made a NaN, an infinity or a saturated number.

A loss gone NaN says that something happened somewhere, often many ops and steps after it did. Here
each op is looked at as it runs, forward, loss, backward and optimizer: one that takes finite
numbers and makes others is an exception's origin, and what is spoiled afterwards leads back to it.

    tensors   least and largest value, statistics
    ops       what an op reads, writes and makes
    lines     the line of Python an op is from
    watch     the dispatch mode that meets every op
    details   what is told of one, and why it happened: the op once more, in float64
    exact     what follows from an overflow, in float64, with it and without
    replay    an op once more, in float64
    lineage   which memory was spoiled by which origin
    origins   origin, consequence, or a constant like a mask's -inf
    kept      gradients, parameters, buffers and optimizer state after each step
    steps     a step from beginning to verdict: finding, expected or absorbed
    response  log, halt, or skip
    loop      a context manager for loops of one's own
    run       mprun's own loop
    found     what is told; plain data
"""

from mprun.numerics.exceptions.found import Found, FpException
from mprun.numerics.exceptions.loop import FpExceptionError, fp_exceptions
from mprun.numerics.exceptions.run import Exceptions, FpExceptions, NoExceptions
from mprun.numerics.exceptions.steps import Outcome

__all__ = [
    "Exceptions",
    "Found",
    "FpException",
    "FpExceptionError",
    "FpExceptions",
    "NoExceptions",
    "Outcome",
    "fp_exceptions",
]
