"""How many weights leave float16's range.

bfloat16 has float32's eight exponent bits, float16 has five. Weights that were trained in bfloat16
or float32 can lie outside of what float16 holds. Training that continues in float16 then fails
without a message: an infinite weight makes the loss NaN, and a zero one has lost what it learned.
By IEEE 754, rounding to nearest and ties to even, a magnitude m becomes

    infinite    from 65520 on: halfway between the largest float16, 65504, and the next one, 65536
    zero        up to 2^-25: half of the smallest subnormal, 2^-24; the tie goes to zero
    subnormal   between, below 2^-14: fixed steps of 2^-24 instead of 11 significant bits

What rounds up to 2^-14, the smallest normal number, is normal: from 2^-14 - 2^-25 on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

OVERFLOWS_FROM = 65520.0
ZERO_UP_TO = 2.0**-25
NORMAL_FROM = 2.0**-14 - 2.0**-25


@dataclass(frozen=True)
class Float16Range:
    """How many of some values leave float16's normal range."""

    total: int
    overflow: int
    """Those that become infinite; infinite ones among them."""
    zero: int
    """Those that become zero and were not."""
    subnormal: int
    """Those that become subnormal, where fewer bits are left the smaller they are."""

    def __str__(self) -> str:
        shares = [self._share(n) for n in (self.overflow, self.zero, self.subnormal)]
        return (
            f"{self.overflow:,} of {self.total:,} overflow ({shares[0]}), "
            f"{self.zero:,} become zero ({shares[1]}), "
            f"{self.subnormal:,} become subnormal, with fewer bits ({shares[2]})"
        )

    def _share(self, count: int) -> str:
        percent = 100 * count / self.total if self.total else 0.0
        if 0 < percent < 0.001:
            return "below 0.001 %"
        return f"{percent:.3f}".rstrip("0").rstrip(".") + " %"


def float16_range(tensors: Iterable[Tensor]) -> Float16Range:
    """Count the values of `tensors` (any shapes, floating dtypes) that leave float16's range."""
    total = overflow = zero = subnormal = 0
    for tensor in tensors:
        size = tensor.detach().float().abs()
        total += size.numel()
        overflow += int((size >= OVERFLOWS_FROM).sum())
        zero += int(((size > 0) & (size <= ZERO_UP_TO)).sum())
        subnormal += int(((size > ZERO_UP_TO) & (size < NORMAL_FROM)).sum())
    return Float16Range(total, overflow, zero, subnormal)
