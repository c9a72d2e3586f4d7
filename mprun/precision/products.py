"""The ops that multiply, and what emulation needs of any op.

The emulations, the fallback to float32, float16 partials and the measurement of accumulation all
use these tables. A composite op (`linear`) and some fused kernels are made of other ops. Such a
kernel is *opened*: called inside a dispatch mode, which sees each of its ops. `CLOSED` lists those
that cannot be opened. Recurrent layers run without oneDNN's and cuDNN's kernels, op by op.

Emulation computes 16-bit ops in float32. It needs the dtype that an op's own kernel would have
given the result, the mixtures of dtypes that the kernel refuses, and what the op writes to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from mprun.precision._torch import (
    aten_packets,
    call_kernel,
    kernel_key,
    schema_of,
    tree_leaves,
)
from mprun.precision.policy import dtype_name

aten = torch.ops.aten

# Each op with the positions of the arguments that enter its products. A vector is a matrix of one
# column: `A @ v` gets what `A @ v[:, None]` does, even where a GPU's routine for it would not.
MATMULS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.addbmm.default: (1, 2),
    aten.mv.default: (0, 1),
    aten.addmv.default: (1, 2),
    aten.dot.default: (0, 1),
    aten.vdot.default: (0, 1),
}
CONVOLUTIONS: dict[Any, tuple[int, ...]] = {aten.convolution.default: (0, 1)}
CONVOLUTION_BACKWARD: dict[Any, tuple[int, ...]] = {aten.convolution_backward.default: (0, 1, 2)}
PRODUCTS = MATMULS | CONVOLUTIONS | CONVOLUTION_BACKWARD
LOW = (torch.float16, torch.bfloat16)  # The 16-bit dtypes


def _names(text: str) -> list[str]:
    return text.split()


# Ops of one library or one kind of convolution, which a program can call directly.
_CONVOLUTIONS = _names(
    "_convolution _conv_depthwise2d _slow_conv2d_forward conv_depthwise3d cudnn_convolution "
    "cudnn_convolution_add_relu cudnn_convolution_relu cudnn_convolution_transpose "
    "miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution "
    "mkldnn_convolution slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d "
    "slow_conv_transpose2d slow_conv_transpose3d"
)
_OTHER_PRODUCTS: dict[str, tuple[int, ...]] = {
    "_addmm_activation": (1, 2),
    "_slow_conv2d_backward": (0, 1, 2),
    **dict.fromkeys(_CONVOLUTIONS, (0, 1)),
}

# Kernels that call products through the dispatcher: opened, each product is seen.
FAST_PATHS = frozenset({"_native_multi_head_attention", "_transformer_encoder_layer_fwd"})
OPENED = FAST_PATHS.union(
    _names(
        "torch_nn::_linear_cross_entropy_batch_chunked "
        "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction _euclidean_dist _trilinear "
        "conv_tbc conv_tbc_backward linalg_matrix_exp linalg_matrix_sqrth linalg_pinv linalg_polar"
    )
)
# Kernels whose products cannot be seen.
CLOSED = frozenset(
    _names(
        "_cudnn_attention_forward _cudnn_rnn _cudnn_rnn_backward _efficient_attention_backward "
        "_efficient_attention_forward _flash_attention_backward _flash_attention_forward "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward "
        "miopen_rnn miopen_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward"
    )
)


def variants(op: Any) -> list[Any]:
    """All overloads of an op, those with `out` and those in place too; arguments are as its own."""
    packets = [op.overloadpacket, getattr(aten, f"{op.overloadpacket.__name__}_", None)]
    return [getattr(packet, name) for packet in packets if packet for name in packet.overloads()]


def all_products() -> dict[Any, tuple[int, ...]]:
    """Every overload that multiplies, with the positions of the arguments it multiplies."""
    table = dict(PRODUCTS)
    for name, positions in _OTHER_PRODUCTS.items():
        if (packet := getattr(aten, name, None)) is not None:  # of some versions of PyTorch
            table[getattr(packet, packet.overloads()[0])] = positions
    return {variant: positions for op, positions in table.items() for variant in variants(op)}


def opened(func: Any, args: Any, names: frozenset[str]) -> Callable[..., Any] | None:
    """The kernel of an op that consists of other ops; a mode around its call sees those ops.

    Below autograd, and in `torch.inference_mode`, PyTorch hands composite ops (`linear`, `matmul`)
    to a mode undivided. `names` are ops to open besides those; the device of `args` decides.
    """
    device = next((x.device.type for x in tree_leaves(args) if isinstance(x, Tensor)), "cpu")
    # Composite ops can be opened everywhere, ops with a kernel of their own only if they are named
    key = kernel_key(func, device, func.name().removeprefix("aten::").partition(".")[0] in names)
    return None if key is None else functools.partial(call_kernel, func, key)


@contextmanager
def unfused() -> Iterator[None]:
    """Inside, attention and recurrent layers are chains of ops, which a dispatch mode sees."""
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), _RecurrentByOps():
            yield
    finally:
        mha.set_fastpath_enabled(before)


class _RecurrentByOps(TorchFunctionMode):
    """Runs recurrent layers without the libraries' kernels, which hold a whole layer."""

    NAMES = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in self.NAMES:
            return func(*args, **kwargs)
        # On CPUs and on GPUs; without them PyTorch runs a layer op by op
        libraries: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)
        before = [library.enabled for library in libraries]
        for library in libraries:
            library.enabled = False
        try:
            return func(*args, **kwargs)
        finally:
            for library, enabled in zip(libraries, before, strict=True):
                library.enabled = enabled


def is_float32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32


def recorded_name(op: Any) -> str:
    """An overload's name in records: "aten.mm", "aten.dot.out"."""
    return str(op).removesuffix(".default")


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
