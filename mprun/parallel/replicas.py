"""`parallel=ddp`: the whole model in each process, by PyTorch's DistributedDataParallel.

The loss of a process is its samples' share of the global batch, so gradients are summed, not
averaged: g = sum over processes of g_i. DistributedDataParallel (Li et al., "PyTorch Distributed",
2020) packs gradients into buckets and sends a bucket while the backward pass computes the next one.
A communication hook decides what is sent: here the bucket in `reduce_dtype`, whose sum is written
back in the gradients' own dtype. With a hook, PyTorch divides by nothing.

All processes get the same bits: the sum of an element is computed in one place and sent to the
others. An infinity or NaN of one process is in every process's sum, so all of them find the same
overflow, skip the same steps and move the loss scale alike.

DistributedDataParallel wraps a module. Here it wraps a forward pass and its loss (`_LossModule`),
not the model: a recipe's `forward` may call any method of its model, and the loss may read
parameters. The model itself, its names and its state stay as they are.

A pass may leave out a part of the model. As in one process, a parameter that no process used has no
gradient. DistributedDataParallel can find such parameters (`find_unused_parameters`), but sends one
more message each step for it, and keeps buckets that suit the backward pass less: 1.13 times the
step of `fashion_mnist` on a link of 1 Gbit/s. So here every pass depends on every parameter
(`_Depends`), if only with no gradient, and which of them have one is sent behind the last bucket.

The mean of floating buffers over processes, such as BatchNorm's statistics.

FSDP2's collectives on CPUs, timed as communication.

FSDP2 gathers a block's parameters and scatters its gradients by itself, so their time would count
as computation. It takes objects that do both in its place (`set_custom_all_gather`). On a CPU they
return when the data are there, so the time of the call is that of the communication. On a GPU they
only enqueue kernels, and FSDP2 keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from mprun import devices
from mprun.errors import RunFailedError
from mprun.parallel.layouts import Compute, GroupLayout
from mprun.parallel.ranks import GroupRanks, Ranks
from mprun.precision.policy import Policy, torch_dtype


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


class _Depends(torch.autograd.Function):
    """A loss as it is, made from all parameters; its backward pass gives them no gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(None for _ in range(ctx.count))


class _LossModule(nn.Module):
    """A forward pass and its loss as a module: its parameters are those that are trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trained = nn.ParameterList(p for p in model.parameters() if p.requires_grad)

    def forward(self, compute: Compute) -> tuple[Tensor, Any]:
        """The loss and the output."""
        loss, output = compute()
        depending: Any = _Depends.apply(loss, *self.trained)
        return depending, output


class ReplicaLayout(GroupLayout):
    """The whole model in each process; all of them take the same steps."""

    kind = "ddp"

    def arrange(self, model: nn.Module, policy: Policy) -> None:
        """Take a prepared model.

        Raises:
            RunFailedError: a gradient is sparse.
        """
        _check(model)
        for p in model.parameters():
            p.grad_dtype = p.dtype  # DistributedDataParallel's buckets have no other
        self._dtype = torch_dtype(policy.reduce_dtype)
        self._took_part = False
        self._sums: list[tuple[Tensor, Tensor, Callable[[], None]]] = []
        """Buckets, what is sent of each, and what waits for its sum."""
        self._devices: Any = [p.device for p in model.parameters() if p.device.type != "cpu"][:1]
        self._buffers = BufferMean(model, self.ranks)
        both = _LossModule(model)
        self._trained = [*both.trained]
        self._replicas = DistributedDataParallel(both, gradient_as_bucket_view=True)
        # the type of `bucket`, as text, would be refused
        self._replicas.register_comm_hook(None, lambda state, bucket: self._sum(bucket))

    def compute(self, compute: Compute, size: int, is_last: bool) -> tuple[Tensor, Any]:
        self._took_part |= size > 0
        with nullcontext() if is_last else self._replicas.no_sync():
            result: tuple[Tensor, Any] = self._replicas(compute)
        if is_last:
            self._buffers.begin(self._took_part)
        return result

    def _sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin to add up a bucket of gradients over processes."""
        own: Tensor = bucket.buffer()
        if not self._took_part:  # all its samples were spare ones
            own.zero_()
        sent = own.to(self._dtype)
        if bucket.is_last():  # all other gradients are in their buckets
            has_gradient = [self._took_part and p.grad is not None for p in self._trained]
            self._is_complete = all(has_gradient)
            flags = sent.new_ones(len(has_gradient))  # on a GPU the host need not wait for ones
            if not self._is_complete:
                flags = sent.new_tensor(has_gradient)
            sent = torch.cat([sent, flags])
        self._sums.append((own, sent, self.ranks.begin_sums([sent])))
        # Gradients are views of the bucket, so nothing is left to do when the sum is there. A
        # function to be called then would be called in another thread, and wait for this one.
        known: torch.futures.Future[Tensor] = torch.futures.Future(devices=self._devices)
        known.set_result(own)
        return known

    def end_backward(self) -> None:
        for own, sent, wait in self._sums:
            wait()
            if sent is not own:
                own.copy_(sent[: own.numel()])
        if not self._is_complete:  # the host waits for the device only then
            present = sent[own.numel() :].tolist()
            for p, count in zip(self._trained, present, strict=True):
                p.grad = p.grad if count else None
        self._sums.clear()
        self._buffers.finish()
        self._took_part = False


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise RunFailedError(
                f"parallel=ddp adds up dense gradients, and those of {name or 'the model'} are "
                "sparse; legal: sparse=False"
            )


class TimedCollective:
    """What FSDP2 asks of a collective, by PyTorch's own, whose name is given."""

    def __init__(self, ranks: GroupRanks, name: str) -> None:
        self._ranks, self._name = ranks, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor that receives the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        with self._ranks.communicating():
            return getattr(dist, self._name)(output_tensor, input_tensor, **options)


def time_collectives(module: FSDPModule, ranks: GroupRanks) -> None:
    """Count the collectives of `module`, which is on a CPU, as communication."""
    gather: Any = TimedCollective(ranks, "all_gather_into_tensor")
    scatter: Any = TimedCollective(ranks, "reduce_scatter_tensor")
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(scatter)
