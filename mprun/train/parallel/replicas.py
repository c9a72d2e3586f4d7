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
gradient (`_Depends`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mprun.errors import RunFailedError
from mprun.precision.policy import Policy, torch_dtype
from mprun.train.parallel.layouts import Compute, GroupLayout


class _Depends(torch.autograd.Function):
    """A loss as it is, made from all parameters; its backward pass gives them no gradient.

    DistributedDataParallel waits for every parameter of a pass. It can find those that a pass does
    not use (`find_unused_parameters`), but sends one more message each step for it, and keeps
    buckets that suit the backward pass less: 1.13 times the step of `fashion_mnist` on a link of
    1 Gbit/s. So every pass depends on every parameter, and which of them have a gradient is sent
    behind the last bucket.
    """

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
        self._sums: list[tuple[Tensor, Tensor, Callable[[], None]]] = []
        """Buckets, what is sent of each, and what waits for its sum."""
        self._devices: Any = [p.device for p in model.parameters() if p.device.type != "cpu"][:1]
        super().arrange(model, policy)
        both = _LossModule(model)
        self._trained = [*both.trained]
        self._replicas = DistributedDataParallel(both, gradient_as_bucket_view=True)
        # the type of `bucket`, as text, would be refused
        self._replicas.register_comm_hook(None, lambda state, bucket: self._sum(bucket))

    def compute(self, compute: Compute, size: int, is_last: bool) -> tuple[Tensor, Any]:
        with nullcontext() if is_last else self._replicas.no_sync():
            return super().compute(partial(self._replicas, compute), size, is_last)

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
        super().end_backward()


def _check(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise RunFailedError(
                f"parallel=ddp adds up dense gradients, and those of {name or 'the model'} are "
                "sparse; legal: sparse=False"
            )
