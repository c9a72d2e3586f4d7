"""What a process holds of the model, as the training loop sees it.

One process holds everything and exchanges nothing: `Layout`, the no-op. With `ddp` each process
holds the whole model: `ReplicaLayout`. With `fsdp2` each process holds a shard: `shards.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mprun.errors import RunFailedError
from mprun.precision import devices
from mprun.precision.loss_scale import ALONE, Combine
from mprun.precision.policy import Policy, torch_dtype
from mprun.train.data import Batch
from mprun.train.data.batches import NOTHING_COUNTS, Whole
from mprun.train.parallel.ranks import Ranks

Compute = Callable[[], tuple[Tensor, Any]]  # Runs a forward pass: its loss and its output


class Layout:
    """One process with the whole model."""

    kind = "none"  # none, ddp or fsdp2
    combine: Combine = ALONE  # What the processes agree on norms and overflows by

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()

    def arrange(self, model: nn.Module, policy: Policy) -> None:
        """Take a prepared model, before its optimizer is made."""

    @contextmanager
    def trainable(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the parameters that its optimizer gets."""
        yield

    def compute(self, compute: Compute, size: int, is_last: bool) -> tuple[Tensor, Any]:
        """Run a forward pass whose backward pass follows, on `size` samples of this process.

        After the step's last one gradients are exchanged.
        """
        return compute()

    def end_backward(self) -> None:
        """All backward passes of a step are done: give the parameters their final gradients."""

    def weighted(self, batch: Batch) -> Batch:
        """The batch with the weight of the whole, where each process knows its own part's alone."""
        return batch

    def model_state(self, model: nn.Module) -> Mapping[str, Any]:
        """The state of the whole model; of several processes, the first one has the values."""
        return model.state_dict()

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load the state of a whole model."""
        model.load_state_dict(state)

    def held(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters and buffers that this process holds, the tensors themselves."""
        named = (*model.named_parameters(), *model.named_buffers())
        return {name: x.detach() for name, x in named}

    def made_whole(self, model: nn.Module, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors like those `held` for the whole model, as `model_state`."""
        return dict(parts)

    def cut(self, model: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process holds of them."""
        return dict(whole)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state for the whole model, as `model_state`."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load an optimizer's state for the whole model."""
        optimizer.load_state_dict(state)


class BufferMean:
    """Gives all processes the mean of their floating buffers, such as BatchNorm's statistics.

    Each process saw other samples. Processes that trained on none do not count.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]

    def begin(self, took_part: bool) -> None:
        """Begin to average the buffers; `took_part`: this process had samples of its own."""
        if not self._buffers:
            return
        # float64: the mean of equal numbers is that number, bit for bit
        flat = torch.cat([devices.wide(b.detach().reshape(-1)) for b in self._buffers])
        flat = torch.cat([flat, flat.new_ones(1)])  # whose sum counts the processes that took part
        self._sums = flat if took_part else torch.zeros_like(flat)
        self._wait = self._ranks.begin_sum(self._sums)

    def finish(self) -> None:
        """Give the buffers their means."""
        if not self._buffers:
            return
        self._wait()
        means = self._sums[:-1] / self._sums[-1]
        parts = means.split([b.numel() for b in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.data.copy_(part.view(buffer.shape))


class GroupLayout(Layout):
    """One of several processes, each of which trains on its part of every batch."""

    def arrange(self, model: nn.Module, policy: Policy) -> None:
        self._buffers = BufferMean(model, self.ranks)
        self._took_part = False
        """Whether a pass of this step was on samples of this process, not on idle ones."""

    def compute(self, compute: Compute, size: int, is_last: bool) -> tuple[Tensor, Any]:
        self._took_part |= size > 0
        result = compute()
        if is_last:
            self._buffers.begin(self._took_part)  # beside the backward pass
        return result

    def end_backward(self) -> None:
        self._buffers.finish()
        self._took_part = False

    def weighted(self, batch: Batch) -> Batch:
        if batch.whole is None or batch.whole.weight is not None:
            return batch
        own = sum(part.size for part in batch.parts)
        weight, size = self.ranks.totals([batch.weight, own])
        if not weight:
            raise RunFailedError(NOTHING_COUNTS)
        return batch._replace(whole=Whole(round(size), weight))


# ---- ddp -----------------------------------------------------------------------------------------


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


# DistributedDataParallel wraps this and not the model: a recipe's `forward` may call any method of
# its model, and the loss may read parameters. The model's names and state stay as they are.
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
    """The whole model in each process, by PyTorch's DistributedDataParallel.

    It packs gradients into buckets, and sends one while the backward pass computes the next one
    (Li et al., "PyTorch Distributed", 2020). A communication hook decides what is sent: here the
    bucket in `reduce_dtype`, whose sum is written back in the gradients' own dtype.

    All processes get the same bits: the sum of an element is computed in one place and sent to the
    others. An infinity or NaN of one process is in every process's sum, so all of them notice the
    same overflow, skip the same steps and move the loss scale alike. As in one process, a parameter
    that no process used has no gradient (`_Depends`).
    """

    kind = "ddp"

    def arrange(self, model: nn.Module, policy: Policy) -> None:
        _refuse_sparse(model)
        for p in model.parameters():
            p.grad_dtype = p.dtype  # DistributedDataParallel's buckets have no other
        self._dtype = torch_dtype(policy.reduce_dtype)
        self._sums: list[tuple[Tensor, Tensor, Callable[[], None]]] = []
        """Buckets, what is sent of each, and what waits for its sum."""
        self._devices: Any = [p.device for p in model.parameters() if p.device.type != "cpu"][:1]
        super().arrange(model, policy)
        both = _LossModule(model)
        self._trained = [*both.trained]
        # views: a sum that is written into a bucket is in the gradients, without a copy
        self._replicas = DistributedDataParallel(both, gradient_as_bucket_view=True)
        # A process's loss is its samples' share of the global batch, so gradients are summed: with
        # a hook, PyTorch divides by nothing. The type of `bucket`, as text, would be refused.
        self._replicas.register_comm_hook(None, lambda state, bucket: self._sum(bucket))

    def compute(self, compute: Compute, size: int, is_last: bool) -> tuple[Tensor, Any]:
        with nullcontext() if is_last else self._replicas.no_sync():
            return super().compute(partial(self._replicas, compute), size, is_last)

    def _sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin to add up a bucket of gradients over processes."""
        own: Tensor = bucket.buffer()
        if not self._took_part:  # all its samples were idle ones
            own.zero_()
        sent = own.to(self._dtype)
        if bucket.is_last():  # all other gradients are in their buckets
            has_gradient = [self._took_part and p.grad is not None for p in self._trained]
            self._is_complete = all(has_gradient)
            flags = sent.new_ones(len(has_gradient))  # on a GPU the host need not wait for ones
            if not self._is_complete:
                flags = sent.new_tensor(has_gradient)
            sent = torch.cat([sent, flags])
        self._sums.append((own, sent, self.ranks.begin_sum(sent)))
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


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise RunFailedError(
                f"parallel=ddp adds up dense gradients, and those of {name or 'the model'} are "
                "sparse; legal: sparse=False"
            )
