"""Signal-to-quantisation-noise ratio: how far rounding has moved a tensor, in dB.

    SQNR = 10 log10(sum of squares of the exact values / sum of squares of the differences)

Each bit of precision is worth 6.02 dB (Bennett, "Spectra of Quantized Signals", 1948). One number
for a whole tensor: large elements weigh most, as they do in what is computed from it.
"""

from __future__ import annotations

import math

from torch import Tensor


def sqnr_db(exact: Tensor, found: Tensor) -> float:
    """The ratio of two tensors of one shape, in dB; computed in float64.

    Infinite where they are equal, minus infinity where only the exact one is zero, NaN where either
    holds a NaN or an infinity.
    """
    exact, found = exact.double(), found.double()
    return ratio_db(exact.square().sum().item(), (found - exact).square().sum().item())


def ratio_db(signal: float, noise: float) -> float:
    """The same of two sums of squares, which may be over several tensors."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
