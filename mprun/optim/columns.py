"""The columns of a policy that an optimizer decides: dtypes of its moments, and its rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.optim import codes
from mprun.optim.base import LowPrecisionOptimizer, kept_in
from mprun.optim.masters import MasterWeights
from mprun.precision.policy import dtype_name
from mprun.precision.products import LOW


def rounding_columns(optimizer: Optimizer, stored: Sequence[torch.dtype]) -> dict[str, str]:
    """The dtypes of an optimizer's moments, and its rounding to 16 or 8 bits.

    A moment is in uint8 if that of one parameter is: small ones keep float32.

    Args:
        optimizer: PyTorch's compute and store the moments in float32 here.
        stored: dtypes of the parameters.
    """
    row = {"rounding": "nearest", "rounding_scope": "update", "overflow": "infinity"}
    row |= {"momentum_dtype": "float32", "variance_dtype": "float32"}
    if isinstance(optimizer, MasterWeights):
        return row | {"rounding": optimizer.rounding, "overflow": optimizer.overflow}
    if not isinstance(optimizer, LowPrecisionOptimizer):
        return row
    group = optimizer.param_groups[0]
    largest = max((p for g in optimizer.param_groups for p in g["params"]), key=Tensor.numel)
    momentum, variance = (kept_in(group[f"{m}_dtype"], largest) for m in ("momentum", "variance"))
    first = momentum if optimizer.keeps_first(group) else torch.float32
    second = torch.float32 if optimizer.second is None else variance
    low = (*LOW, codes.DTYPE)
    row["momentum_dtype"], row["variance_dtype"] = dtype_name(first), dtype_name(second)
    rounding: str = group["rounding"]
    if not any(dtype in low for dtype in (*stored, first, second)):
        return row
    if any(dtype in LOW for dtype in stored):
        row["rounding"] = rounding
    elif second in low or rounding != "nearest":  # moments have no remainder
        row["rounding"] = "stochastic"
    row["overflow"] = group["overflow"]
    return row
