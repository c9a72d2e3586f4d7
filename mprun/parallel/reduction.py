"""Sums of gradients, and means of buffers, over processes that each hold the whole model.

The loss of a process is its samples' share of the global batch, so gradients are summed, not
averaged: g = sum over processes of g_i. They are packed into buckets, sent and added up in
`reduce_dtype`, and written back in the gradient's own dtype. All processes get the same bits: the
sum of an element is computed in one place and sent to the others. An infinity or NaN of one process
is in every process's sum, so all of them find the same overflow, skip the same steps and move the
loss scale alike.

PyTorch's DistributedDataParallel is not used: it averages, needs gradients in the parameters'
dtype, and fails where a process leaves out a part of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from mprun.errors import RunFailedError
from mprun.parallel.ranks import Ranks

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's default: large enough for the bandwidth, and several are under way."""


class GradientSum:
    """Adds up the gradients of a model over processes.

    Args:
        model: the prepared model, equal in all processes.
        ranks: the processes.
        reduce_dtype: what gradients are sent and added up in.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, reduce_dtype: torch.dtype) -> None:
        self._ranks, self._dtype = ranks, reduce_dtype
        trained = [p for p in model.parameters() if p.requires_grad]
        self._buckets = [*_buckets(trained, reduce_dtype.itemsize)]

    def __call__(self, took_part: bool) -> None:
        """Give every parameter the sum of its gradients.

        A parameter without a gradient in any process keeps none, as in one process.

        Args:
            took_part: whether this process trained on samples of the step; gradients of one that
                did not count nothing.

        Raises:
            RunFailedError: a gradient is sparse.
            PeerLostError: another process is gone.
        """
        flats = [self._packed(bucket, took_part) for bucket in self._buckets]
        self._ranks.sum_tensors(flats)
        for bucket, flat in zip(self._buckets, flats, strict=True):
            _unpack(bucket, flat)

    def _packed(self, bucket: list[nn.Parameter], took_part: bool) -> Tensor:
        """The gradients of a bucket, then 1 for each that there is."""
        pieces, present = [], []
        for p in bucket:
            gradient = p.grad if took_part else None
            if gradient is not None and gradient.is_sparse:
                raise RunFailedError(
                    "parallel=ddp adds up dense gradients, and a parameter of shape "
                    f"{list(p.shape)} has a sparse one; legal: sparse=False"
                )
            present.append(float(gradient is not None))
            piece = torch.zeros_like(p) if gradient is None else gradient
            pieces.append(piece.reshape(-1).to(self._dtype))
        there = torch.tensor(present, dtype=self._dtype, device=bucket[0].device)
        return torch.cat([*pieces, there])


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

    def __call__(self, took_part: bool) -> None:
        """Average the buffers, in float64: what is equal in all processes stays as it is."""
        if not self._buffers:
            return
        flat = torch.cat([b.detach().reshape(-1).double() for b in self._buffers])
        flat = torch.cat([flat, flat.new_ones(1)])
        flat = flat if took_part else torch.zeros_like(flat)
        self._ranks.sum_tensors([flat])
        means = flat[:-1] / flat[-1]
        parts = means.split([b.numel() for b in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.data.copy_(part.view(buffer.shape))


def _buckets(trained: Iterable[nn.Parameter], itemsize: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, at most `BUCKET_BYTES` together, each bucket on one device."""
    bucket: list[nn.Parameter] = []
    size = 0
    for p in trained:
        nbytes = p.numel() * itemsize
        if bucket and (size + nbytes > BUCKET_BYTES or p.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += nbytes
    if bucket:
        yield bucket


def _unpack(bucket: list[nn.Parameter], flat: Tensor) -> None:
    sums = flat[: -len(bucket)].split([p.numel() for p in bucket])
    if all(p.grad is not None for p in bucket):  # then all are there, and nothing is read
        present = [True] * len(bucket)
    else:
        present = (flat[-len(bucket) :] > 0).tolist()
    for p, total, is_there in zip(bucket, sums, present, strict=True):
        if not is_there:
            p.grad = None
        elif p.grad is not None:
            p.grad.copy_(total.view(p.shape))
        else:
            p.grad = total.view(p.shape).to(p.grad_dtype or p.dtype)
