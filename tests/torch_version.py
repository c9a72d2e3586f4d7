"""What the tests have to know of the version of PyTorch that they run with."""

from __future__ import annotations

import torch

from mprun import release


def torch_is(*oldest: int) -> bool:
    """Whether PyTorch is this release or a newer one: `torch_is(2, 14)`."""
    return release(torch.__version__) >= oldest
