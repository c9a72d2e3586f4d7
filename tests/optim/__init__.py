"""What the tests of `mprun.optim` share: optimizers by name, values of every size, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mprun.optim import SGD, AdamW, LowPrecisionOptimizer, RMSprop

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FLOAT, HALF, BRAIN)
LOW = (HALF, BRAIN)
RULES = (
    ("nearest", "infinity"),
    ("nearest", "saturate"),
    ("stochastic", "infinity"),
    ("stochastic", "saturate"),
    ("kahan", "infinity"),
)
"""Every legal pair of rounding and overflow."""
STORED = ((FLOAT, FLOAT), (HALF, HALF), (HALF, FLOAT), (BRAIN, BRAIN), (BRAIN, FLOAT))
"""Dtypes of parameter and gradient."""

Make = Callable[..., LowPrecisionOptimizer]
MAKE: dict[str, Make] = {
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": partial(RMSprop, lr=0.01, weight_decay=0.1),
    "rmsprop_momentum": partial(RMSprop, lr=0.01, weight_decay=0.1, momentum=0.9),
    "sgd": partial(SGD, lr=0.1, weight_decay=0.1),
    "sgd_momentum": partial(SGD, lr=0.1, weight_decay=0.1, momentum=0.9),
    "sgd_nesterov": partial(SGD, lr=0.1, weight_decay=0.1, momentum=0.9, nesterov=True),
}


def moment_options(name: str, first: torch.dtype, second: torch.dtype) -> dict[str, torch.dtype]:
    """The moments' dtypes, as far as the optimizer `name` has such a moment."""
    options = {}
    if name not in ("sgd", "rmsprop"):
        options["momentum_dtype"] = first
    if not name.startswith("sgd"):
        options["variance_dtype"] = second
    return options


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def patterns(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Random bit patterns: every exponent alike, so subnormals, infinities and NaN are in it."""
    words = torch.randint(-(2**31), 2**31, (count,), generator=generator(seed), dtype=torch.int64)
    if dtype == FLOAT:
        return words.to(torch.int32).view(FLOAT)
    return (words >> 16).to(torch.int16).view(dtype)


def wide(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Half of the values random patterns, half of them of size 1."""
    ordinary = torch.randn(count, generator=generator(seed + 1))
    every = patterns(dtype, count, seed)
    pick = torch.rand(count, generator=generator(seed + 2)) < 0.5
    return torch.where(pick, ordinary.to(dtype), every)


def normal(shape: Iterable[int], seed: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(tuple(shape), generator=generator(seed)).to(dtype)


def give(p: Tensor, gradient: Tensor) -> None:
    """Make it the gradient of `p`, in its own dtype."""
    p.grad = None
    p.grad_dtype = gradient.dtype
    p.grad = gradient


def parameters(values: Iterable[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(x.clone()) for x in values]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bit patterns; any NaN equals any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    word = torch.int32 if a.dtype == FLOAT else torch.int16
    both_nan = a.isnan() & b.isnan()
    return bool(((a.detach().view(word) == b.detach().view(word)) | both_nan).all())


def unlike(a: LowPrecisionOptimizer, b: LowPrecisionOptimizer) -> list[str]:
    """What differs in a bit: parameters and entries of the state, by number and name."""
    ours = [p for group in a.param_groups for p in group["params"]]
    theirs = [p for group in b.param_groups for p in group["params"]]
    found = []
    for number, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        one: dict[str, Any] = {"parameter": p, **a.state[p]}
        other: dict[str, Any] = {"parameter": q, **b.state[q]}
        assert one.keys() == other.keys()
        found += [f"{number}: {name}" for name in one if not same_bits(one[name], other[name])]
    return found


def widen(state: dict[str, Tensor], size: int | None = None, part: slice = slice(None)) -> None:
    """Give moments, of a part of `size` numbers, values of every size: infinities too."""
    for number, (entry, kept) in enumerate(sorted(state.items())):
        if entry not in ("step", "remainder") and kept.dtype in DTYPES and "_scale" not in entry:
            values = wide(kept.dtype, kept.numel() if size is None else size, seed=7 + number)[part]
            kept.copy_(values if entry in ("exp_avg", "momentum_buffer") else values.abs())
