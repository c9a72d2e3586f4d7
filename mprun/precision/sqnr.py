"""The size of rounding errors: the signal-to-quantisation-noise ratio (SQNR), in dB.

For the values of a tensor,

    SQNR = 10 log10(sum of squares of the exact values / sum of squares of the differences)

in dB; each bit of precision is worth 6.02 dB (Bennett, "Spectra of Quantized Signals", 1948). It is
one number for a whole tensor: large elements count most, as they do in every sum over it.
"""

from __future__ import annotations

import math

from torch import Tensor


def sqnr_db(exact: Tensor, low: Tensor) -> float:
    """The ratio of two tensors of one shape, in dB; computed in float64.

    Infinite if they are equal, minus infinity if only the exact one is zero, NaN if a value of
    either is not finite.
    """
    exact, low = exact.double(), low.double()
    return sums_db(exact.square().sum().item(), (low - exact).square().sum().item())


def sums_db(signal: float, noise: float) -> float:
    """The ratio of two sums of squares, which may be over several tensors, in dB."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    return ratio_db(signal, noise)


def ratio_db(signal: float, noise: float) -> float:
    """The ratio of two powers in dB; inf without noise, -inf without signal or with all noise."""
    if noise == 0:
        return math.inf
    if signal == 0 or math.isinf(noise):
        return -math.inf
    # A difference of logarithms: the quotient of a tiny signal and a huge noise may be 0.
    return 10 * (math.log10(signal) - math.log10(noise))
