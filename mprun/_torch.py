"""Every private PyTorch interface mprun uses, in one place.

Tried on PyTorch 2.11 and 2.15. A name that moves breaks here, and nowhere else.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["FakeTensorMode", "in_backward"]


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's backward pass."""
    return torch._C._current_autograd_node() is not None
