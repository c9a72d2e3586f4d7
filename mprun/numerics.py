"""The numerics of a training step: memory, ops and their dtypes, exponents, rounding errors."""

from mprun.inspect.collect import Statistics, statistics
from mprun.inspect.op_search import Sensitivity, sensitivity
from mprun.inspect.tolerance import Tolerance
from mprun.watch.cast_counts import CastCounts
from mprun.watch.memory_recorder import (
    MemoryRecorder,
    StepMemory,
    fake_tensors,
    memory,
    record_memory,
)
from mprun.watch.nonfinite import FpException, FpExceptionError, NonfiniteReport, fp_exceptions

__all__ = [
    "CastCounts",
    "FpException",
    "FpExceptionError",
    "MemoryRecorder",
    "NonfiniteReport",
    "Sensitivity",
    "Statistics",
    "StepMemory",
    "Tolerance",
    "fake_tensors",
    "fp_exceptions",
    "memory",
    "record_memory",
    "sensitivity",
    "statistics",
]
