"""The work of a training step: the operations and bytes of each op.

An op takes at least

    max(FLOPs / peak rate of its number format, bytes / bandwidth)

on any machine with that rate and bandwidth (S. Williams, A. Waterman, D. Patterson, "Roofline: an
insightful visual performance model for multicore architectures", 2009). This module counts the
numerators; `mprun.doctor.roofline` has the rates.

FLOPs of matrix products, convolutions and attention, forward and backward, are those of
`torch.utils.flop_counter`: a multiplication and an addition count as two. Two parts of its count
are work that a good kernel leaves out, and are subtracted: products with a convolution's zero
padding, and the half of causal attention that is masked. It has no LSTM; oneDNN's is added, cuDNN's
is not.

Bytes are the least that an op must read and write: each distinct tensor counts once, with the bytes
of its distinct numbers (one that `expand` made has no more than its source). Kernels may move more
(a write to memory often reads the cache line first), never less.

    views              nothing is read or written
    factories          `zeros_like` reads nothing, `empty` does not even write
    overwriting        `copy_` and `fill_` do not read what they replace
    shapes only        the backward pass of a pooling takes its input, and does not read it
    lookups            an embedding reads the rows it returns, not the whole table
    indexed writes     what is not written to is not counted

The optimizer counts as one pass, whatever its kernels are: each parameter and its state are read
and written once, each gradient is read once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from mprun._torch import in_backward, op_name, schema_of, storage_key
from mprun.numerics.memory_recorder import NO_OPS
from mprun.numerics.op_watcher import OpWatcher, RunOp, tensors_of
from mprun.numerics.step_events import StepListener
from mprun.results.roofline_result import GroupName

OVERWRITES = frozenset(
    ("copy_", "zero_", "fill_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_")
)
"""They do not read the tensor they write to."""

FACTORIES = ("empty", "zeros", "ones", "full", "rand", "new_", "arange", "scalar_tensor", "eye")
"""Beginnings of the names of ops that take a tensor for its shape alone."""

NOT_READ: dict[str, tuple[str, ...]] = {
    "max_pool2d_with_indices_backward": ("self",),
    "max_pool3d_with_indices_backward": ("self",),
    "avg_pool2d_backward": ("self",),
    "_adaptive_avg_pool2d_backward": ("self",),
    "nll_loss_forward": ("self",),
    "nll_loss_backward": ("self",),
    "nll_loss2d_forward": ("self",),
    "nll_loss2d_backward": ("self",),
    "index_put_": ("self",),
    "_index_put_impl_": ("self",),
    "index_add_": ("self",),
    "index_copy_": ("self",),
    "scatter_": ("self",),
    "scatter_add_": ("self",),
    "embedding_renorm_": ("self",),
    "resize_": ("self",),
}
"""Arguments of which an op needs the shape alone, or few numbers."""

LOOKUPS: dict[str, str] = {
    "embedding": "weight",
    "index": "self",
    "index_select": "self",
    "gather": "self",
    "take": "self",
}
"""The table that an op reads as much of as it returns."""


class OpTraffic(NamedTuple):
    """What an op moves."""

    read: int
    """Bytes."""
    written: int
    """Bytes."""
    is_view: bool
    """Whether it makes other views of its arguments and nothing else."""


def traffic(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> OpTraffic:
    """The least bytes that an op reads and writes.

    Args:
        func: the `OpOverload`.
        args, kwargs: its arguments.
        result: its result.
    """
    name = op_name(func)
    arguments = list(_arguments(func, args, kwargs))
    taken = {storage_key(x) for _, _, value in arguments for x in tensors_of(value)}
    changed = {_key(x): x for _, writes, value in arguments if writes for x in tensors_of(value)}
    made = {_key(x): x for x in tensors_of(result) if storage_key(x) not in taken}
    if not made and not changed:
        inputs = any(True for _ in tensors_of((args, dict(kwargs))))
        is_view = inputs and any(True for _ in tensors_of(result))
        return OpTraffic(0, 0, is_view)
    is_empty = name.startswith(("empty", "new_empty"))
    is_indexed = name in NOT_READ and bool(changed)  # few numbers may be written
    written = {} if is_empty or is_indexed else {**made, **changed}
    return OpTraffic(_bytes(_read(name, arguments, made)), _bytes(written), False)


def tensor_bytes(x: Tensor) -> int:
    """The bytes of a tensor's distinct numbers."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return min(int(count) * x.element_size(), int(x.untyped_storage().nbytes()))


def _read(
    name: str, arguments: list[tuple[str, bool, Any]], made: Mapping[Any, Tensor]
) -> dict[Any, int]:
    """What is read: key of a tensor to bytes."""
    if name.startswith(FACTORIES):
        return {}
    unread = _unread(name, arguments)
    made_bytes = _bytes(made)
    read: dict[Any, int] = {}
    for argument, writes, value in arguments:
        if argument in unread or (writes and name in OVERWRITES):
            continue
        most = made_bytes if LOOKUPS.get(name) == argument else None
        for x in tensors_of(value):
            nbytes = tensor_bytes(x)
            read[_key(x)] = nbytes if most is None else min(nbytes, most)
    return read


def _unread(name: str, arguments: list[tuple[str, bool, Any]]) -> Sequence[str]:
    """The arguments that an op does not read."""
    if name == "convolution_backward":  # each gradient is computed from the other factor
        mask = next(value for argument, _, value in arguments if argument == "output_mask")
        return [n for n, wanted in zip(("weight", "input"), mask, strict=False) if not wanted]
    return NOT_READ.get(name, ())


def _bytes(tensors: Mapping[Any, Tensor | int]) -> int:
    return sum(x if isinstance(x, int) else tensor_bytes(x) for x in tensors.values())


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, bool, Any]]:
    """Name, whether the op writes to it, and value of each argument."""
    for n, argument in enumerate(schema_of(func).arguments):
        given = n < len(args)
        if given or argument.name in kwargs:
            info = argument.alias_info
            value = args[n] if given else kwargs[argument.name]
            yield argument.name, info is not None and info.is_write, value


def _key(x: Tensor) -> tuple[Any, ...]:
    """Equal for tensors with the same numbers in the same memory."""
    return storage_key(x), x.storage_offset(), tuple(x.shape), x.stride()


UPDATE = "update"
"""The name of the one op that stands for the optimizer."""

RECURRENT: dict[str, tuple[tuple[str, str], int]] = {
    "mkldnn_rnn_layer": (("weight0", "weight1"), 2),
    "mkldnn_rnn_layer_backward": (("weight1", "weight2"), 4),
}
"""oneDNN's layers of an LSTM: the arguments with weights, and FLOPs per weight and sample."""


@dataclass(frozen=True)
class OpCost:
    """The work of one op."""

    name: str
    """ATen's, without the overload; `UPDATE` for the optimizer."""
    phase: str
    """forward, backward, optimizer, or other (loss, loss scale, clipping)."""
    group: GroupName
    dtype: torch.dtype | None
    """Of the factors of a product; None for ops that are counted by bytes alone."""
    flops: int
    nbytes: int
    """Read and written."""
    time_s: float
    """Of the kernel and the dispatcher, as it ran; of no meaning on fake tensors."""


class CostCounter(OpWatcher, StepListener):
    """Counts the ops of a step while it is entered; views are left out.

    Args:
        synchronize: waits for the device; not needed on the CPU.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._synchronize = synchronize
        self._ops: list[OpCost] = []
        self._updates: list[OpCost] = []
        self._update_began = self._update_s = 0.0

    def costs(self) -> list[OpCost]:
        """The ops in order, those of the optimizer as one."""
        rest = [op for op in self._ops if op.phase != "optimizer"]
        return [*rest, *self._updates]

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        context, back = self.tracker.context(), in_backward()
        self._synchronize()
        began = time.perf_counter()
        result = run()
        self._synchronize()
        time_s = time.perf_counter() - began
        if func.namespace not in NO_OPS:
            phase = "backward" if back else context.phase
            self._ops += _cost(func, args, kwargs, result, phase, time_s)
        return result

    def on_update_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._synchronize()
        self._update_began = time.perf_counter()

    def on_update_end(self, optimizer: Optimizer) -> None:
        self._synchronize()
        seen_s = sum(op.time_s for op in self._ops if op.phase == "optimizer")
        # Kernels of mprun are no ops; the dispatcher's price of counting is in the whole time.
        time_s = seen_s or time.perf_counter() - self._update_began
        nbytes = update_bytes(optimizer)
        self._updates.append(OpCost(UPDATE, "optimizer", "optimizer", None, 0, nbytes, time_s))


def count_costs(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: Optimizer,
    synchronize: Callable[[], None] = lambda: None,
    warmup: int = 1,
) -> list[OpCost]:
    """The work of one training step.

    Args:
        step: runs one whole step: zero gradients, forward, backward, optimizer step.
        model: the model it trains.
        optimizer: its optimizer.
        synchronize: waits for the device.
        warmup: steps run first, uncounted: most optimizers make their state in the first one.
    """
    for _ in range(warmup):
        step()
    counter = CostCounter(synchronize)
    with counter.following(model, optimizer, listeners=[counter]), counter:
        step()
    return counter.costs()


def update_bytes(optimizer: Optimizer) -> int:
    """The bytes that an optimizer's step moves in one pass over what it has a gradient for."""
    total = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                state = tensors_of(dict(optimizer.state.get(p, {})))
                total += 2 * sum(map(tensor_bytes, (p, *state)))
                total += tensor_bytes(p.grad) if p.grad.layout == torch.strided else 0
    return total


def _cost(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    phase: str,
    time_s: float,
) -> Iterator[OpCost]:
    if not all(x.layout == torch.strided for x in tensors_of((args, dict(kwargs), result))):
        return
    moved = traffic(func, args, kwargs, result)
    if moved.is_view:
        return
    name, flops = op_name(func), op_flops(func, args, kwargs, result)
    dtypes = [x.dtype for x in tensors_of((args, dict(kwargs))) if x.is_floating_point()]
    dtype = dtypes[0] if flops and dtypes else None
    group = _group(name, flops, args, result)
    yield OpCost(name, phase, group, dtype, flops, moved.read + moved.written, time_s)


def _group(name: str, flops: int, args: tuple[Any, ...], result: Any) -> GroupName:
    if flops:
        return "convolution" if "conv" in name else "matmul"
    if name == "_to_copy" and args[0].dtype != result.dtype:
        return "cast"
    if name == "copy_" and args[0].dtype != args[1].dtype:
        return "cast"
    return "memory-bound"


def op_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Multiplications and additions of an op; 0 where `torch.utils.flop_counter` knows none.

    Products with zero padding, and those that causal attention masks, do not count.
    """
    if op_name(func) in RECURRENT:
        return _recurrent_flops(func, args, kwargs)
    formula = _formula(func)
    if formula is None:
        return 0
    flops = int(formula(*args, **kwargs, out_val=result))
    by_name = _by_name(func, args, kwargs)
    if by_name.get("is_causal") is True:
        flops //= 2
    if op_name(func) in ("convolution", "convolution_backward") and not by_name["transposed"]:
        images = by_name["input"].shape[2:]
        kernel = by_name["weight"].shape[2:]
        done, counted = _products(images, kernel, by_name)
        flops = flops * done // counted if counted else flops
    return flops


def _formula(func: Any) -> Any:
    """PyTorch's formula for an op; before 2.15 it had none for attention on a CPU."""
    packet = func.overloadpacket
    if packet not in flop_registry and "_flash_attention_for_cpu" in op_name(func):
        packet = getattr(torch.ops.aten, op_name(func).replace("_for_cpu", ""))  # same arguments
    return flop_registry.get(packet)


def _recurrent_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Every step of a sequence multiplies by all weights of the layer."""
    weights, factor = RECURRENT[op_name(func)]
    by_name = _by_name(func, args, kwargs)
    x = by_name["input"]  # [steps, batch, inputs]
    steps = x.numel() // max(1, x.shape[-1])
    return int(factor * steps * sum(by_name[name].numel() for name in weights))


def _products(
    images: Sequence[int], kernel: Sequence[int], by_name: Mapping[str, Any]
) -> tuple[int, int]:
    """Products of numbers of one image and one filter: without those with padding, and all."""
    done = counted = 1
    rows: Iterable[tuple[int, ...]] = zip(
        images,
        kernel,
        *(_each(by_name[n], len(images)) for n in ("stride", "padding", "dilation")),
        strict=True,
    )
    for size, taps, stride, padding, dilation in rows:
        outputs = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        starts = [tap * dilation - padding for tap in range(taps)]
        done *= sum(_inside(start, stride, outputs, size) for start in starts)
        counted *= outputs * taps
    return done, counted


def _inside(start: int, stride: int, outputs: int, size: int) -> int:
    """How many of start, start + stride, ... (`outputs` of them) are from 0 to size - 1."""
    first = max(0, -(start // stride))
    last = min(outputs - 1, (size - 1 - start) // stride)
    return max(0, last - first + 1)


def _each(value: Sequence[int], dimensions: int) -> list[int]:
    values = [int(v) for v in value]
    return values * dimensions if len(values) == 1 else values


def _by_name(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = schema_of(func).arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | {name: value for name, _, value in _arguments(func, args, kwargs)}
