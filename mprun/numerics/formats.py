"""What a number format keeps of a tensor: rounding to any of them, and the noise that adds.

A format of p significand bits (the leading one counted), smallest normal number 2^e_min and largest
number M keeps a multiple of

    2^(max(e, e_min) - p + 1)        for values of exponent e,

a fixed step below 2^e_min (subnormal numbers), and has no number above M. Rounding is to nearest,
ties to even. Beyond M float16, bfloat16 and TF32 have infinity; conversion to the two float8
formats saturates at M, as hardware and libraries do (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022).

The noise of rounding is compared with the signal as a power ratio (`sqnr.py`). Float8 and float16
are also looked at with *per-tensor scaling*: values are multiplied by the power of two that takes
the largest of them closest to M from below, and divided by it afterwards, which is how float8 is
used. For bfloat16 and TF32, which have float32's range, that changes nothing.

All of it is computed on the values divided by a power of two near the largest, in float32: the
ratio is the same, and squares of gradients of 1e-25 do not vanish. Values more than 2^126 below
the largest are taken as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mprun.numerics.histograms import BLOCK, Histogram
from mprun.numerics.sqnr import ratio_db


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    name: str
    bits: int
    """Significand bits, the leading one included."""
    smallest_normal: int
    """The exponent of the smallest normal number."""
    largest: float
    saturates: bool = False
    """Whether larger values become the largest one rather than infinite."""

    @property
    def smallest(self) -> int:
        """The exponent of the smallest subnormal number."""
        return self.smallest_normal - self.bits + 1

    @property
    def limit(self) -> float:
        """Where values become too large: from here on infinite, or above here, the largest one."""
        if self.saturates:
            return self.largest
        return self.largest + 2.0 ** (_exponent(self.largest) - self.bits)

    def too_large(self, x: Tensor, factor: float) -> Tensor:
        """Whether each of `x` over `factor` is."""
        limit = self.limit * factor
        return x.abs() > limit if self.saturates else x.abs() >= limit


def _exponent(x: float) -> int:
    return math.frexp(x)[1] - 1


FP16 = Format("fp16", 11, -14, 65504.0)
BF16 = Format("bf16", 8, -126, (2 - 2**-7) * 2.0**127)
TF32 = Format("tf32", 11, -126, (2 - 2**-10) * 2.0**127)
E4M3 = Format("e4m3", 4, -6, 448.0, saturates=True)
"""float8_e4m3fn: no infinity, and its top mantissa is NaN; for weights and activations."""
E5M2 = Format("e5m2", 3, -14, 57344.0, saturates=True)
"""float8_e5m2: more range, less precision; for gradients."""
FORMATS = (FP16, BF16, TF32, E4M3, E5M2)
SCALED = (FP16, E4M3, E5M2)
"""Those that per-tensor scaling makes a difference to."""


def rounded(x: Tensor, to: Format, shift: int = 0) -> Tensor:
    """`x` times 2^shift, rounded to `to`, divided by 2^shift again.

    Args:
        x: float32, any shape; finite, below 2^100.
        to: the format.
        shift: a whole number; nothing overflows on the way but where `to` does.
    """
    return _limited(_to_units(x, _power_below(x), to, shift), to, 2.0**-shift)


def _power_below(x: Tensor) -> Tensor:
    """The power of two at or below the magnitude of each of `x`; 0 below 2^-126."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _to_units(x: Tensor, power: Tensor, to: Format, shift: int) -> Tensor:
    """`x` rounded to a multiple of the unit at its exponent, as if there were no largest number."""
    normal = to.smallest_normal - shift
    if normal > 100 + to.bits:  # half of the smallest number is above all values
        return torch.zeros_like(x)
    # 1.5 2^23 units: a float32 of that size has the unit as its last bit.
    magic = power.clamp(min=2.0**normal).mul_(1.5 * 2.0 ** (24 - to.bits))
    return (x + magic).sub_(magic)


def _limited(x: Tensor, to: Format, factor: float) -> Tensor:
    largest = to.largest * factor
    if largest > torch.finfo(torch.float32).max:
        return x
    if to.saturates:
        return x.clamp_(-largest, largest)
    return x.masked_fill_(x > largest, math.inf).masked_fill_(x < -largest, -math.inf)


@dataclass
class Noise:
    """Power of some values, and of what rounding to each format adds to them."""

    signal: float = 0.0
    """Sum of squares of the finite values."""
    noise: dict[str, float] = field(default_factory=dict)
    """Format to the sum of squares of the differences; `_scaled` after those with a scale."""
    above: dict[str, int] = field(default_factory=dict)
    """Format to how many finite values round to more than its largest number."""

    def db(self, name: str) -> float:
        """The signal-to-noise ratio in a format; see `ratio_db`."""
        return ratio_db(self.signal, self.noise.get(name, 0.0))

    def __iadd__(self, other: Noise) -> Noise:
        self.signal += other.signal
        for mine, others in ((self.noise, other.noise), (self.above, other.above)):
            for name, value in others.items():
                mine[name] = mine.get(name, 0) + value  # type: ignore[assignment]
        return self


def noise_of(x: Tensor, seen: Histogram) -> Noise:
    """What rounding to each of `FORMATS` would add to a tensor's values.

    Args:
        x: any shape, floating; infinities and NaN are left out.
        seen: its histogram.
    """
    if not seen.nonzero:
        return Noise()
    exponent = _exponent(seen.largest)
    top = seen.largest / 2.0**exponent  # 1 to 2, as all blocks are divided
    ways = [(f, f.name, exponent) for f in FORMATS]
    ways += [(f, f"{f.name}_scaled", _exponent(f.largest / top)) for f in SCALED]
    exceeded = [f for f in FORMATS if seen.largest >= f.limit]
    powers = torch.zeros(1 + len(ways), dtype=torch.float64, device=x.device)
    above = torch.zeros(len(exceeded), dtype=torch.int64, device=x.device)
    for block in _blocks(x.detach(), exponent, finite=not (seen.infinite or seen.nan)):
        powers[0] += torch.dot(block, block)
        power = _power_below(block)
        for n, (to, _, shift) in enumerate(ways, start=1):
            result = _to_units(block, power, to, shift)
            if shift == exponent and to in exceeded:
                result = _limited(result, to, 2.0**-shift)
            difference = result.sub_(block)
            powers[n] += torch.dot(difference, difference)
        for n, to in enumerate(exceeded):
            above[n] += to.too_large(block, 2.0**-exponent).sum()
    signal, *noise = (p * 2.0**exponent * 2.0**exponent for p in powers.tolist())
    return Noise(
        signal,
        {name: p for (_, name, _), p in zip(ways, noise, strict=True)},
        {f.name: n for f, n in zip(exceeded, above.tolist(), strict=True)},
    )


def _blocks(x: Tensor, exponent: int, finite: bool) -> Iterator[Tensor]:
    """The values over 2^exponent, in float32; infinities and NaN as 0."""
    flat = x.reshape(-1)
    for block in flat.split(BLOCK if x.device.type == "cpu" else len(flat)):
        wide = block.float() if block.dtype.itemsize < 4 else block
        wide = wide if finite else torch.nan_to_num(wide, 0.0, 0.0, 0.0)
        if abs(exponent) > 100:  # 2^exponent, or its reciprocal, may not be a float32
            wide = wide.double()
        half = -exponent // 2  # in two factors: one alone may not be a float64
        yield (wide * 2.0**half * 2.0 ** (-exponent - half)).float()


def expected_db(seen: Histogram, signal: float, to: Format, scale: float = 1.0) -> float:
    """The signal-to-noise ratio, in dB, of values of a histogram times `scale` rounded to `to`.

    The error of rounding is taken as evenly spread over a unit, whose square over 12 is its mean
    (Bennett, 1948). Values up to half of the smallest number become 0 and are all error; they are
    taken as spread evenly between powers of two, where the squares' mean is 7/3 4^e.

    Args:
        seen: the histogram.
        signal: the sum of squares of its finite values.
        to: float16, bfloat16 or TF32.
        scale: a positive number; other than a power of two it is taken as the one below it.

    Returns:
        -inf where a value becomes infinite; inf where there is no value but zero.
    """
    if seen.infinite or seen.nan or seen.largest * scale >= to.limit:
        return -math.inf
    by, noise = _exponent(scale), 0.0
    top = max(seen.exponents, default=0)  # errors over 4^top: none overflows
    for e, count in seen.exponents.items():
        error = 7 / 3 * 4.0 ** (e - top)
        if e + by >= to.smallest - 1:
            error = 4.0 ** (max(e + by, to.smallest_normal) - to.bits + 1 - by - top) / 12
        noise += count * error
    # No error is larger than its value.
    return max(0.0, ratio_db(signal / 2.0**top / 2.0**top, noise))
