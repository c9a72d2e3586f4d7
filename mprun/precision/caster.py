"""Casters: what decides an op's dtype while the model runs.

A caster is a region: inside it, ops cast their inputs by some rule; outside it they run in the
dtype of their inputs. The loss, the backward pass (which follows the dtypes of the forward one)
and the optimizer step are outside.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Caster(Protocol):
    """Gives the region a forward pass runs in."""

    def region(self) -> AbstractContextManager[object]:
        """A new region; regions of one caster do not nest."""


class NoCaster:
    """Nothing is cast: ops run in the dtype of their inputs."""

    _nothing = nullcontext()

    def region(self) -> AbstractContextManager[object]:
        return self._nothing


class AutocastCaster:
    """PyTorch's autocast: its lists for the device decide (torch.amp, "Autocast Op Reference").

    Args:
        device_type: "cpu" or "cuda"; the lists differ between them.
        dtype: bfloat16 or float16, what listed ops compute in.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._dtype = dtype

    def region(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device_type, self._dtype)
