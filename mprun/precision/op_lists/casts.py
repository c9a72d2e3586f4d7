"""Casting tensors for an op: which are cast at all, and weights once.

A weight is cast anew wherever an op takes it: twice where layers are tied, at every step of a
recurrent loop, for every micro-batch. The cast copy is kept instead, until the region ends (until
the step ends, where several forward passes make one), as torch.autocast does. What makes a copy
stale or wrong to use is looked at: another weight, a changed one (`_version`), or one cast while no
graph was recorded, from which no gradient would flow back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CASTABLE = frozenset((torch.float32, torch.float16, torch.bfloat16))
"""Dtypes that are ever cast; float64, integers, bool and complex stay what they are."""

WIDTH = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 2, torch.float64: 3}


def widest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds all of `dtypes`: float16 with bfloat16 gives float32."""
    top = max(WIDTH[dtype] for dtype in dtypes)
    among = [dtype for dtype in dtypes if WIDTH[dtype] == top]
    return among[0] if len(among) == 1 else torch.float32


class Casts:
    """Does the casts of a region and keeps those of weights."""

    def __init__(self) -> None:
        # (id, dtype, whether a graph is recorded) -> the weight, its version, the copy
        self._kept: dict[tuple[int, torch.dtype, bool], tuple[Tensor, int, Tensor]] = {}

    def to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` in `dtype`, differentiably; `x` itself where it has it or is never cast."""
        have = x.dtype
        if have is dtype or have not in CASTABLE:
            return x
        if x.requires_grad and x.is_leaf and not torch.compiler.is_compiling():
            return self._weight(x, dtype)
        return x.to(dtype)

    def _weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = (id(weight), dtype, torch.is_grad_enabled())
        kept = self._kept.get(key)
        if kept is not None and kept[0] is weight and kept[1] == weight._version:
            return kept[2]
        cast = weight.to(dtype)
        if not (torch.is_inference_mode_enabled() or weight.is_inference()):
            self._kept[key] = weight, weight._version, cast
        return cast

    def forget(self) -> None:
        """Let go of the copies."""
        self._kept.clear()


Cast = Callable[[Tensor, torch.dtype], Tensor]
"""`Casts.to`, or one that tells somebody too."""
