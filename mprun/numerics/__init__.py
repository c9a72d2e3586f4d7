"""The numerics of a training step: memory, ops and their dtypes, exponents, rounding errors."""

from mprun.numerics.cast_counts import CastCounts
from mprun.numerics.collect import Statistics, statistics
from mprun.numerics.memory_recorder import MemoryRecorder, fake_tensors, memory, record_memory
from mprun.numerics.nonfinite import (
    FpException,
    FpExceptionError,
    NonfiniteReport,
    fp_exceptions,
)
from mprun.numerics.op_search import Sensitivity, sensitivity
from mprun.numerics.process_memory import StepMemory
from mprun.numerics.tolerance import Tolerance

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
