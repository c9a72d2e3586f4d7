"""FSDP2's collectives on CPUs, timed as communication.

FSDP2 gathers a block's parameters and scatters its gradients by itself, so their time would count
as computation. It takes objects that do both in its place (`set_custom_all_gather`). On a CPU they
return when the data are there, so the time of the call is that of the communication. On a GPU they
only enqueue kernels, and FSDP2 keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mprun.parallel.ranks import GroupRanks


class _Collective:
    """What FSDP2 asks of a collective: the tensor that receives the result."""

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TimedAllGather(_Collective):
    """The parts of all processes, one after the other."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        with self._ranks.communicating():
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class TimedReduceScatter(_Collective):
    """This process's part of the sum over processes."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with self._ranks.communicating():
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def time_collectives(module: FSDPModule, ranks: GroupRanks) -> None:
    """Count the collectives of `module`, which is on a CPU, as communication."""
    gather: Any = TimedAllGather(ranks)
    scatter: Any = TimedReduceScatter(ranks)
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(scatter)
