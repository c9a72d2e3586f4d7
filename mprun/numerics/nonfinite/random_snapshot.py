"""The states of all random number generators that a model may draw from.

PyTorch's (the CPU's and those of the model's CUDA devices), Python's and, where it is imported,
NumPy's. To take a snapshot draws no number. It costs about 50 us, most of it for Python and NumPy,
whose states are 2.5 kB each.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RandomSnapshot(NamedTuple):
    """The states at one moment."""

    cpu: Tensor
    """uint8, as of `torch.get_rng_state`."""
    cuda: dict[str, Tensor]
    """Device (`cuda:0`) to its state."""
    python: tuple[Any, ...]
    numpy: Any
    """None where NumPy's was not in use."""

    def as_plain(self) -> dict[str, Any]:
        """As tensors, lists and numbers."""
        version, words, gauss = self.python
        numpy = None
        if self.numpy is not None:
            kind, state = self.numpy["bit_generator"], self.numpy["state"]
            cached = int(self.numpy["has_gauss"]), float(self.numpy["gauss"])
            numpy = [str(kind), state["key"].tolist(), int(state["pos"]), *cached]
        python = [version, list(words), gauss]
        return {"cpu": self.cpu, "cuda": self.cuda, "python": python, "numpy": numpy}


def random_snapshot(devices: Iterable[torch.device]) -> RandomSnapshot:
    """The states now; of CUDA those of `devices`."""
    numpy = sys.modules.get("numpy.random")
    return RandomSnapshot(
        torch.get_rng_state(),
        {str(d): torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"},
        random.getstate(),
        None if numpy is None else numpy.get_state(legacy=False),  # in half the time of a tuple
    )


def restore_random(saved: dict[str, Any]) -> None:
    """Set the generators to states that `as_plain` gave; CUDA's where there is such a device.

    Raises:
        Exception: of any kind, where the states are none.
    """
    torch.set_rng_state(saved["cpu"])
    for device, state in saved["cuda"].items():
        if torch.cuda.is_available() and torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    if saved["numpy"] is not None:
        import numpy as np

        kind, keys, position, has_gauss, cached = saved["numpy"]
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
