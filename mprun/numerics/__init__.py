"""Looking at the numerics of a step: what is alive, what is computed, in which dtype."""

from mprun.numerics.exceptions import FpException, FpExceptionError, fp_exceptions

__all__ = ["FpException", "FpExceptionError", "fp_exceptions"]
