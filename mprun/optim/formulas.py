"""What a formula of `optimizers` is, for one element in float32, and how its results are stored.

A formula takes the parameter w, the gradient g and moments m and v, and returns the change that is
subtracted from w, and the new moments. The order of operations is that of `kernels/steps.h`.
A decay is a part of the change: a factor 1 - lr * weight_decay would lose one below 3e-8.

**Moments in 8 bits** are places in the *dynamic map* of 256 values with 7 decades of magnitude, and
a float32 scale for each 256 numbers, so that an outlier costs its block precision and not the
tensor (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022). Here:

    scale     the block's number of largest magnitude, with its sign; NaN where one is not finite
    second    the square root is stored; a positive one never becomes 0, since it is divided by
    rounding  stochastic, but of a first moment if `rounding` is nearest: a step changes a second
              moment by 0.1 %, and neighbours are 0.7 to 7 % apart

Blocks are counted in the tensor, so a shard has other blocks than the whole: shards are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mprun.precision._torch import is_fake
from mprun.precision.random_bits import shift_right
from mprun.records.policy_columns import COMPENSATED

Results = tuple[Tensor, Tensor, Tensor]
Formula = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Results]
HYPERS = 9  # Entries of `hyper`: AdamW needs all; a formula that needs fewer leaves the rest at 0
SCALE = 2.0**6
"""The factor of a moment in float16, if the update is a quotient of moments.

Gradients are small for float16's range: a moment below 2^-24 is 0 at most steps and 2^-24 at the
others, so a quotient of two such moments is up to 40 times too large. With this factor, moments are
representable from 2^-30 (1e-9) on, with all 11 bits from 2^-20 (1e-6) on, and up to 1023.5; larger
ones become 1023.5 instead of infinite. The C kernels call this format S16.
"""


def scale(dtype: torch.dtype | None) -> float:
    """The factor of a moment of a quotient that is stored in `dtype`."""
    return SCALE if dtype == torch.float16 else 1.0


def root(x: Tensor) -> Tensor:
    """The square root, correctly rounded as C's.

    PyTorch's own on a CPU is a vector library's, off by one unit for one number in six.
    """
    if x.device.type != "cpu" or is_fake(x):
        return x.sqrt()
    y = torch.empty_like(x)
    with np.errstate(invalid="ignore"):
        np.sqrt(x.detach().numpy(), out=y.numpy())
    return y


FORMULAS: dict[str, Formula] = {}
QUOTIENTS: set[str] = set()  # Formulas whose update is a quotient of moments: see `SCALE`


def formula(function: Formula) -> Formula:
    FORMULAS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Storage:
    """How parameters and moments of one tensor are stored and rounded."""

    formula: str
    param: torch.dtype
    grad: torch.dtype
    first: torch.dtype | None  # The first moment's dtype; None where the optimizer has none
    second: torch.dtype | None
    """The second moment's; in 16 or 8 bits its square root is stored: it needs half the exponents.

    In float16 it is stored times `SCALE`, and so is the first moment of a quotient. In uint8 a
    moment has scales beside it.
    """
    rounding: str
    """nearest, stochastic, kahan or split, of the parameters.

    A first moment in 16 or 8 bits is rounded to nearest if the parameters are, else stochastically.
    A second moment is always rounded stochastically. To nearest it would never decay: 0.999 times a
    bfloat16 number rounds to that number.
    """
    saturate: bool

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    @property
    def first_scale(self) -> float:
        """The factor of the stored first moment."""
        return scale(self.first) if self.formula in QUOTIENTS else 1.0

    @property
    def second_scale(self) -> float:
        """The factor of the stored root of the second moment."""
        return scale(self.second)

    @cached_property
    def root(self) -> bool:
        """Whether the second moment is stored as its square root."""
        return self.second is not None and self.second != torch.float32

    @cached_property
    def draws(self) -> bool:
        """Whether anything is rounded stochastically."""
        return self.rounding != "nearest" or self.root

    @cached_property
    def remainder(self) -> torch.dtype | None:
        """The dtype of the remainder beside the parameter; None without one."""
        if self.rounding not in COMPENSATED or self.param == torch.float32:
            return None
        return torch.int16 if self.rounding == "kahan" else torch.int8

    @cached_property
    def coded(self) -> bool:
        """Whether a moment is stored in codes of 8 bits."""
        return DTYPE in (self.first, self.second)


DTYPE = torch.uint8
PER_SCALE = 256  # Numbers that share a scale
# Tensors of fewer numbers have float32 moments, as in bitsandbytes and torchao: biases and norms
# are sensitive, and the memory is elsewhere
SMALL = 4096
DECADES = 7  # Of magnitude, as in Dettmers et al.: gradients within a tensor differ by millions
_MAGNITUDE = 0x7FFFFFFF
_INFINITE = 0x7F800000


def dynamic_map(signed: bool) -> tuple[float, ...]:
    """The 256 values of the map, ascending: the middles of equal parts of each decade, 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        size = 10.0 ** (decade - DECADES + 1)
        middles = [size * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        values += middles + ([-x for x in middles] if signed else [])
    return tuple(sorted(values))


def maps(like: Tensor) -> Tensor:
    """Both maps, float32 [2, 256], on the device of `like`: of first moments, and of roots."""
    return _maps.__wrapped__(like.device) if is_fake(like) else _maps(like.device)


@cache
def _maps(device: torch.device) -> Tensor:
    return torch.tensor([dynamic_map(True), dynamic_map(False)], device=device)


def scales_for(count: int) -> int:
    """The number of scales of a tensor of `count` numbers; the last block may be short."""
    return -(-count // PER_SCALE)


def decode(codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """The float32 numbers of uint8 codes, flat; `scales` of the blocks, `values` of the map."""
    return values[codes.int()] * _spread(scales, codes.numel())


def encode(x: Tensor, values: Tensor, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """The uint8 codes of float32 numbers, flat, and a float32 scale for each block of them.

    `values` is the map; numbers are not negative where it has no negative value. The upper 16 of
    `bits` (int32) decide; None: to nearest.
    """
    scales = _scales(x)
    ratio = x / _spread(scales, x.numel())
    ratio = torch.where(ratio.isnan(), 0.0, ratio)  # 0 / 0, or a block that is not finite
    below = (torch.bucketize(ratio, values, right=True) - 1).clamp(min=0)
    above = (below + 1).clamp(max=PER_SCALE - 1)
    low = values[below]
    rest, gap = ratio - low, values[above] - low
    if bits is None:
        # A tie goes up, as in C
        up = rest >= gap * 0.5
    else:
        # The middles of 2^16 equal parts of 0 to 1: never 0, so a value of the map stays itself
        up = rest > (shift_right(bits, 16).float() * 2.0**-16 + 2.0**-17) * gap
    codes = torch.where(up, above, below)
    # The map of roots: a positive root is divided by, so it never becomes 0
    floor = (ratio > 0) & (values[0] == 0)
    return torch.where(floor, codes.clamp(min=1), codes).to(DTYPE), scales


def _scales(x: Tensor) -> Tensor:
    """The number of largest magnitude of each block; NaN where one is not finite."""
    # Zeros are never the number of largest magnitude of a block that has another
    words = pad(x, (0, -x.numel() % PER_SCALE)).view(torch.int32).view(-1, PER_SCALE)
    largest = (words & _MAGNITUDE).amax(1)
    # Words of negative numbers are negative.
    size = largest.view(torch.float32)
    signed = torch.where(largest > words.amax(1), -size, size)
    return torch.where(largest >= _INFINITE, torch.nan, signed)


def _spread(scales: Tensor, count: int) -> Tensor:
    """The scale of each of `count` numbers."""
    return scales.unsqueeze(1).expand(-1, PER_SCALE).reshape(-1)[:count]
