"""Looking at the numerics of a step: what is alive, what is computed, in which dtype."""

from mprun.numerics.op_sensitivity import Sensitivity, Tolerance, sensitivity

__all__ = ["Sensitivity", "Tolerance", "sensitivity"]
