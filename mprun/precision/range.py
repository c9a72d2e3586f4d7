"""What weights lose when float16 has to hold them.

bfloat16 has float32's eight exponent bits, float16 has five. So weights that grew, or shrank, where
bfloat16 was the narrowest format can lie outside what float16 holds, and training that goes on in
it then fails without a word: an infinite weight makes the loss NaN, a zero one learns nothing of
what it was. By IEEE 754, rounding to nearest and ties to even, a magnitude m becomes

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
class Float16Loss:
    """How many of some weights leave float16's normal range."""

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


def float16_loss(tensors: Iterable[Tensor]) -> Float16Loss:
    """Count what float16 would do to the values of `tensors`: any shapes, floating dtypes."""
    total = overflow = zero = subnormal = 0
    for tensor in tensors:
        size = tensor.detach().float().abs()
        total += size.numel()
        overflow += int((size >= OVERFLOWS_FROM).sum())
        zero += int(((size > 0) & (size <= ZERO_UP_TO)).sum())
        subnormal += int(((size > ZERO_UP_TO) & (size < NORMAL_FROM)).sum())
    return Float16Loss(total, overflow, zero, subnormal)
