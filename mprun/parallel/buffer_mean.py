"""The mean of floating buffers over processes, such as BatchNorm's statistics."""

from __future__ import annotations

import torch
from torch import nn

from mprun import devices
from mprun.parallel.ranks import Ranks


class BufferMean:
    """Gives all processes the mean of their floating buffers, such as BatchNorm's statistics.

    Each process saw other samples. Processes that trained on none do not count.

    Args:
        model: the prepared model.
        ranks: the processes.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]

    def begin(self, took_part: bool) -> None:
        """Begin to average the buffers, which a step's forward passes have updated.

        In float64: what is equal in all processes stays as it is.

        Args:
            took_part: whether this process's passes were on samples of its own.
        """
        if not self._buffers:
            return
        flat = torch.cat([devices.wide(b.detach().reshape(-1)) for b in self._buffers])
        flat = torch.cat([flat, flat.new_ones(1)])
        self._sums = flat if took_part else torch.zeros_like(flat)
        self._wait = self._ranks.begin_sums([self._sums])

    def finish(self) -> None:
        """Give the buffers their means."""
        if not self._buffers:
            return
        self._wait()
        means = self._sums[:-1] / self._sums[-1]
        parts = means.split([b.numel() for b in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.data.copy_(part.view(buffer.shape))
