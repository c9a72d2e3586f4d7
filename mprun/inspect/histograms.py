"""How a tensor's values spread over the powers of two: it decides which formats have their range.

A float is +-m 2^e with 1 <= m < 2; its exponent e alone decides whether a format's range includes
it. (`frexp` has m in 0.5..1, and so e + 1.) Exponents are read from the bit patterns, which is
exact for subnormal numbers too. Zeros, infinities and NaN have none and are counted apart.

A format's limits are powers of two, so the histogram gives the shares below them. Multiplying by a
power of two only shifts the histogram. Some limits belong to the side above, some to the side below
(2^-25 becomes 0 in float16, 2^-24 does not), so exact powers of two are also counted separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mprun.inspect.numerics import ExponentCounts

BLOCK = 2**16  # Elements counted together on a CPU: so many stay in a core's cache

_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
_MANTISSA_BITS = {torch.float32: 23, torch.float64: 52}
_BIAS = {torch.float32: 127, torch.float64: 1023}  # IEEE 754: the field of exponent 0


@dataclass(frozen=True)
class Histogram:
    """Counts of values by exponent."""

    exponents: Mapping[int, int] = field(default_factory=dict)
    """e to the number of values with 2^e <= |x| < 2^(e+1)."""
    powers: Mapping[int, int] = field(default_factory=dict)
    """e to the number of those with |x| = 2^e."""
    zero: int = 0
    infinite: int = 0
    nan: int = 0
    largest: float = 0.0  # The largest finite magnitude; 0 without any

    @property
    def nonzero(self) -> int:
        """Finite values that are not zero."""
        return sum(self.exponents.values())

    @property
    def total(self) -> int:
        """All values."""
        return self.nonzero + self.zero + self.infinite + self.nan

    def below(self, exponent: int) -> int:
        """How many of the non-zero values have |x| < 2^exponent."""
        return sum(n for e, n in self.exponents.items() if e < exponent)

    def up_to(self, exponent: int) -> int:
        """How many of the non-zero values have |x| <= 2^exponent."""
        return self.below(exponent) + self.powers.get(exponent, 0)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            dict(Counter(self.exponents) + Counter(other.exponents)),
            dict(Counter(self.powers) + Counter(other.powers)),
            self.zero + other.zero,
            self.infinite + other.infinite,
            self.nan + other.nan,
            max(self.largest, other.largest),
        )

    def counts(self) -> ExponentCounts:
        """The same as recorded: exponents as text, in ascending order."""
        exponents, powers = (
            {str(e): n for e, n in sorted(x.items())} for x in (self.exponents, self.powers)
        )
        return ExponentCounts(exponents, powers, self.zero, self.infinite, self.nan, self.largest)


def pooled(histograms: Iterable[Histogram]) -> Histogram:
    """The histogram of several tensors' values together."""
    return sum(histograms, Histogram())


def histogram(x: Tensor) -> Histogram:
    """The histogram of a tensor's values.

    Args:
        x: any shape; float64, float32, or narrower, float8 included.

    Raises:
        TypeError: its values are not real floating-point numbers.
    """
    if not x.is_floating_point():
        raise TypeError(f"a histogram of {x.dtype}; legal: floating-point dtypes")
    if not x.numel():
        return Histogram()
    x = x.detach()
    x = x if x.dtype in _INTEGER else x.float()  # exact
    bits = _MANTISSA_BITS[x.dtype]
    patterns = x.reshape(-1).view(_INTEGER[x.dtype])
    fields = 2 * (_BIAS[x.dtype] + 1)  # how many values the exponent's field has
    infinity = (fields - 1) << bits  # the last field without mantissa; with one it is NaN
    counts = torch.zeros(2 * fields, dtype=torch.int64, device=x.device)
    largest, small = patterns.new_zeros(1), []
    for block in patterns.split(BLOCK if x.device.type == "cpu" else len(patterns)):
        magnitude = block & ((1 << (8 * x.element_size() - 1)) - 1)  # without the sign's bit
        # Even: values of an exponent's field; odd: those of them without mantissa.
        index = (magnitude >> bits) * 2 + ((magnitude & ((1 << bits) - 1)) == 0)
        counts += torch.bincount(index, minlength=2 * fields)
        finite = torch.where(magnitude < infinity, magnitude, 0)
        largest = torch.maximum(largest, finite.max())
        small.append(magnitude[index == 0])  # subnormals: their exponents are in the mantissas
    exponents, powers = _normal(counts.tolist(), _BIAS[x.dtype])
    for e, n, exact in _subnormal(torch.cat(small), 1 - _BIAS[x.dtype] - bits):
        exponents[e] += n
        powers[e] += exact
    return Histogram(
        dict(exponents),
        {e: n for e, n in powers.items() if n},
        zero=int(counts[1]),  # field 0 without mantissa
        infinite=int(counts[-1]),
        nan=int(counts[-2]),
        largest=float(largest.view(x.dtype).item()),
    )


def _normal(counts: list[int], bias: int) -> tuple[Counter[int], Counter[int]]:
    """Counts by exponent, and those of exact powers, from counts by field and mantissa."""
    exponents, powers = Counter[int](), Counter[int]()
    for number in range(1, len(counts) // 2 - 1):  # the first is of subnormals, the last of none
        rest, exact = counts[2 * number : 2 * number + 2]
        if rest + exact:
            exponents[number - bias] = rest + exact
            powers[number - bias] = exact
    return exponents, powers


def _subnormal(patterns: Tensor, unit: int) -> Iterator[tuple[int, int, int]]:
    """Exponent, count, and count of exact powers, of numbers that are pattern times 2^unit."""
    if not len(patterns):
        return
    mantissas, exponents = torch.frexp(patterns.double())  # exact: at most 52 bits
    counts = torch.bincount(exponents).tolist()
    exact = torch.bincount(exponents[mantissas == 0.5], minlength=len(counts)).tolist()
    for e, n in enumerate(counts):
        if n:
            yield e - 1 + unit, n, exact[e]  # frexp's exponent is one larger
