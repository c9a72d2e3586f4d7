"""What the tests of `mprun.precision` share."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of the normal distribution, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
