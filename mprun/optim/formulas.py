"""The formulas of the optimizers, for one element in float32, and how their results are stored.

A formula takes the parameter w, the gradient g and two moments m and v. It returns the change that
is subtracted from w, and the new moments. `hyper` has the constants of a step; the gradient was
already multiplied by the first one. The order of operations is that of `mprun/kernels/update.c`, so
that both give the same bits.

AdamW's decay is a part of the change. In a factor 1 - lr * weight_decay float32 would round a decay
below 3e-8 to 0, and one of 1e-7 to 1.2e-7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cached_property

import torch
from torch import Tensor

from mprun.optim import codes
from mprun.precision.policy import COMPENSATED

Results = tuple[Tensor, Tensor, Tensor]
Formula = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Results]
HYPERS = 9
"""Entries of `hyper`; a formula that needs fewer leaves the rest at 0."""
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


def adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Tensor) -> Results:
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019)."""
    m = m * h[1] + g * h[2]
    v = v * h[3] + (g * g) * h[4]
    decay = torch.where(torch.isfinite(w), w * h[5], 0.0)  # infinity less infinity would be NaN
    return decay + h[6] * (m / (root(v) * h[7] + h[8])), m, v


def sgd(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Tensor) -> Results:
    """SGD with momentum, as in PyTorch."""
    g = g + w * h[1]
    m = m * h[2] + g * h[4]
    return h[3] * m, m, v


def nesterov(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Tensor) -> Results:
    """SGD with Nesterov's momentum (Sutskever et al., 2013, as in PyTorch)."""
    g = g + w * h[1]
    m = m * h[2] + g
    return h[3] * (g + m * h[2]), m, v


def rmsprop(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Tensor) -> Results:
    """RMSprop (Hinton, lecture 6e, 2012), eps outside the root, momentum as in PyTorch."""
    g = g + w * h[1]
    v = v * h[2] + (g * g) * h[3]
    m = m * h[4] + g / (root(v) + h[5])
    return h[6] * m, m, v


def root(x: Tensor) -> Tensor:
    """The square root, correctly rounded as C's.

    PyTorch's own on a CPU is a vector library's, off by one unit for one number in six.
    """
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return x.double().sqrt().float()
    return x.sqrt()


FORMULAS: dict[str, Formula] = {f.__name__: f for f in (adamw, sgd, nesterov, rmsprop)}


@dataclass(frozen=True)
class Storage:
    """How parameters and moments of one tensor are stored and rounded."""

    formula: str
    param: torch.dtype
    grad: torch.dtype
    first: torch.dtype | None
    """The first moment's dtype; None where the optimizer has none."""
    second: torch.dtype | None
    """The second moment's; in 16 or 8 bits its square root is stored: it needs half the exponents.

    In float16 it is stored times `SCALE`, and so is AdamW's first moment. In uint8 a moment has
    scales beside it: see `codes`.
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
        return scale(self.first) if self.formula == "adamw" else 1.0

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
        return codes.DTYPE in (self.first, self.second)
