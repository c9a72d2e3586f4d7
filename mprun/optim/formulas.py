"""What an optimizer computes for one element, in float32, and how its results are stored.

A formula takes the parameter w, the gradient g and two moments m and v and returns what is
subtracted from w, and the new moments; the constants of a step come in `hyper`, whose first entry
the gradient was already multiplied by. The order of operations is that of
`mprun/kernels/update.c`, so that both give the same bits.

AdamW's decay is part of what is subtracted: in the factor 1 - lr * weight_decay float32 would round
a decay below 3e-8 away, and one of 1e-7 to 1.2e-7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Results = tuple[Tensor, Tensor, Tensor]
Formula = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Results]
HYPERS = 9
"""Entries of `hyper`; a formula that needs fewer leaves the rest at 0."""
SCALE = 2.0**6
"""What a moment in float16 is multiplied by where the update is a quotient of moments.

Gradients are small for float16's range: a moment below 2^-24 is 0 at most steps and 2^-24 at the
others, and a quotient of two such moments is up to 40 times what it should be. Multiplied by this,
moments are representable from 2^-30 (1e-9) on, with all 11 bits from 2^-20 (1e-6) on, and up to
1023.5; larger ones become 1023.5 instead of infinite. The C kernels have it as format S16.
"""


def scale(dtype: torch.dtype | None) -> float:
    """What a moment of a quotient is multiplied by where it is stored in `dtype`."""
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


FORMULAS: dict[str, Formula] = {
    "adamw": adamw,
    "sgd": sgd,
    "nesterov": nesterov,
    "rmsprop": rmsprop,
}


@dataclass(frozen=True)
class Storage:
    """How parameters and moments of one tensor are stored and rounded."""

    formula: str
    param: torch.dtype
    grad: torch.dtype
    first: torch.dtype | None
    """The first moment's dtype; None where the optimizer has none."""
    second: torch.dtype | None
    """The second moment's; in 16 bits its square root is stored: it needs half the exponents.

    In float16 it is stored times `SCALE`, and so is AdamW's first moment.
    """
    rounding: str
    """nearest, stochastic or kahan, of the parameters.

    A first moment in 16 bits is rounded to nearest where the parameters are, else stochastically; a
    second one always stochastically, because to nearest it never decays: 0.999 of a bfloat16 number
    rounds back to it.
    """
    saturate: bool

    @property
    def first_scale(self) -> float:
        """What the first moment is multiplied by where it is stored."""
        return scale(self.first) if self.formula == "adamw" else 1.0

    @property
    def second_scale(self) -> float:
        """What the second moment's root is."""
        return scale(self.second)

    @property
    def root(self) -> bool:
        """Whether the second moment is stored as its square root."""
        return self.second is not None and self.second != torch.float32

    @property
    def compensated(self) -> bool:
        """Whether a remainder is stored beside the parameter."""
        return self.rounding == "kahan" and self.param != torch.float32
