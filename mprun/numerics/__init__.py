"""Looking at the numerics of a step: what is alive, what is computed, in which dtype."""

from mprun.numerics.footprint import MemoryRecorder, fake_tensors, memory, record_memory
from mprun.numerics.step_memory import StepMemory

__all__ = ["MemoryRecorder", "StepMemory", "fake_tensors", "memory", "record_memory"]
