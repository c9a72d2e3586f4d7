"""Which dtype PyTorch gives an op's result, and what the op writes to.

Emulation computes 16-bit ops in float32. Then it needs the dtype that the op's own kernel would
have given the result, and it refuses the mixtures of dtypes that the kernel refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from mprun.precision._torch import aten_packets, schema_of, tree_leaves
from mprun.precision.policy import dtype_name
from mprun.precision.products import CONVOLUTION_BACKWARD, CONVOLUTIONS, LOW, MATMULS

aten = torch.ops.aten

_NESTED = (list, tuple, dict)
Arguments = tuple[Any, Mapping[str, Any]]  # Positional and keyword arguments

# Their results are moved or selected inputs: exact in the inputs' dtype.
EXACT = aten_packets(
    "_local_scalar_dense _unsafe_view abs amax amin cat clamp_min clone constant_pad_nd embedding "
    "empty_like fill_ flip full_like gather index index_select masked_fill masked_fill_ max "
    "max_pool2d_with_indices maximum min minimum neg new_empty new_empty_strided new_zeros "
    "ones_like relu relu_ roll select_backward slice_backward sort stack threshold_backward topk "
    "tril triu where zero_ zeros_like"
)
# Random numbers; rounding could move them beyond the end of their range.
DRAWN = aten_packets("bernoulli_ normal_ rand rand_like randn randn_like uniform_")
UNTOUCHED = EXACT | DRAWN
# Namespaces of ops that send numbers to other processes, or arrange them for it. Their schemas do
# not name what they write to, also after they returned.
COMMUNICATION = ("c10d", "c10d_functional", "_c10d_functional", "fsdp")
# Normalizations and their gradients: the first result is like the first argument, the others
# (statistics, gradients of weights) are promoted. So float32 weights leave 16-bit numbers 16 bits.
NORMS = aten_packets(
    "cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm miopen_batch_norm_backward "
    "native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward "
    "native_layer_norm native_layer_norm_backward"
)
# Their kernels take floating arguments of one dtype alone; in float32 mixtures would be promoted.
UNPROMOTED = {
    op.overloadpacket for op in (*MATMULS, *CONVOLUTIONS, *CONVOLUTION_BACKWARD)
} | aten_packets(
    "_embedding_bag _embedding_bag_forward_only _cudnn_rnn _thnn_fused_gru_cell "
    "_thnn_fused_lstm_cell addbmm_ addmm_ addmv_ baddbmm_ grid_sampler_2d grid_sampler_3d "
    "index_add index_add_ index_put index_put_ linalg_cross masked_scatter masked_scatter_ "
    "mkldnn_rnn_layer scatter scatter_ scatter_add scatter_add_"
)
# Arguments an op writes to without its schema saying so.
WRITES = {aten.native_batch_norm.default: ("running_mean", "running_var")}


def result_dtype(func: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype PyTorch would give the result, where 16-bit numbers take part; else None.

    A dtype among the arguments decides; otherwise tensors are promoted, those without dimensions
    counting only where there are no others. Of an op in `NORMS`, all results but the first.

    Raises:
        RuntimeError: dtypes are mixed that the op's own kernel does not take together.
    """
    named, tensors, low = None, [], False
    for x in leaves(args, kwargs):
        if isinstance(x, Tensor):
            if x.dtype.is_floating_point:
                tensors.append(x)
                low = low or x.dtype in LOW
        elif isinstance(x, torch.dtype) and x.is_floating_point:
            named = x
            low = low or x in LOW
    if not low:
        return None
    if named is not None:
        return named
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) == 1:
        return dtypes.pop()
    _check_mixed(func.overloadpacket, [t.dtype for t in tensors])
    decisive = [t for t in tensors if t.dim()] or tensors
    return reduce(torch.promote_types, (t.dtype for t in decisive))


def _check_mixed(op: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse floating arguments' dtypes as kernels do: computed in float32, all would be taken."""
    refused = len(set(dtypes)) > 1 and op in UNPROMOTED
    if op in NORMS:
        refused = not {*dtypes} <= {dtypes[0], torch.float32}
    if refused:
        names = " and ".join(dtype_name(d) for d in dict.fromkeys(dtypes))
        raise RuntimeError(f"{op}: floating arguments of one dtype are needed; got {names}")


def widen(x: Any) -> Any:
    """A 16-bit tensor, or the dtype of one, in float32; anything else unchanged."""
    if isinstance(x, Tensor) and x.dtype in LOW:
        return x.float()
    return torch.float32 if isinstance(x, torch.dtype) and x in LOW else x


def leaves(*arguments: Any) -> list[Any]:
    """What lists, tuples and dictionaries of an op's arguments hold, however deep."""
    values: list[Any] = []
    for x in arguments:
        if isinstance(x, _NESTED):
            values += leaves(*(x.values() if isinstance(x, dict) else x))
        else:
            values.append(x)
    return values


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """An op's arguments or results with `function` applied to their leaves."""
    if not isinstance(x, _NESTED):
        return function(x)
    if isinstance(x, dict):
        return {key: mapped(function, value) for key, value in x.items()}
    return type(x)([mapped(function, v) if isinstance(v, _NESTED) else function(v) for v in x])


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an op may write to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema_of(func).arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in WRITES.get(func, ())
    )


def written(func: Any, call: Arguments, wide: Arguments) -> Iterator[tuple[Tensor, Tensor]]:
    """The 16-bit tensors an op writes to, each with the float32 one written instead."""
    for position, name in written_arguments(func):
        pair = [
            args[position] if position < len(args) else kwargs.get(name)
            for args, kwargs in (call, wide)
        ]
        for low, instead in zip(*map(tree_leaves, pair), strict=True):
            if isinstance(low, Tensor) and low.dtype in LOW:
                yield low, instead
