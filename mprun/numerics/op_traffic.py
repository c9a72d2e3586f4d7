"""The bytes that an op must read and write, from its arguments and results.

Each distinct tensor counts once, with the bytes of its distinct numbers: a tensor that `expand`
made has no more than its source. The count is a least one:

    views              nothing is read or written
    factories          `zeros_like` reads nothing, `empty` does not even write
    overwriting        `copy_` and `fill_` do not read what they replace
    shapes only        the backward pass of a pooling takes its input, and does not read it
    lookups            an embedding reads the rows it returns, not the whole table
    indexed writes     what is not written to is not counted

Kernels may move more (a write to memory often reads the cache line first), never less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mprun._torch import op_name, schema_of, storage_key
from mprun.numerics.op_watcher import tensors_of

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
