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

from mprun import devices


class RandomSnapshot(NamedTuple):
    """The states at one moment."""

    cpu: Tensor
    """uint8, as of `torch.get_rng_state`."""
    devices: dict[str, Tensor]
    """An accelerator (`cuda:0`) to its state."""
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
        return {"cpu": self.cpu, "devices": self.devices, "python": python, "numpy": numpy}


def random_snapshot(of: Iterable[torch.device]) -> RandomSnapshot:
    """The states now; of accelerators those of `of`."""
    numpy = sys.modules.get("numpy.random")
    return RandomSnapshot(
        torch.get_rng_state(),
        devices.random_states(of),
        random.getstate(),
        None if numpy is None else numpy.get_state(legacy=False),  # in half the time of a tuple
    )


def restore_random(saved: dict[str, Any]) -> None:
    """Set the generators to states that `as_plain` gave; an accelerator's where there is one.

    Raises:
        Exception: of any kind, where the states are none.
    """
    torch.set_rng_state(saved["cpu"])
    devices.restore_random_states(saved["devices"])
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    if saved["numpy"] is not None:
        import numpy as np

        kind, keys, position, has_gauss, cached = saved["numpy"]
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
