"""The ops that multiply: matmuls and convolutions, and the kernels that contain some.

The emulations, the fallback to float32, float16 partials and the measurement of accumulation all
use these tables.

A composite op (`linear`, `matmul`) and some fused kernels (attention's fast path) are made of other
ops. Such a kernel is *opened*: it is called inside a dispatch mode, and the mode sees each of its
ops. `CLOSED` lists the fused kernels that cannot be opened. Recurrent layers run without oneDNN's
and cuDNN's kernels, so that each of their products is a separate op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from mprun.precision._torch import call_kernel, kernel_key, tree_leaves

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
    to a mode undivided.

    Args:
        args: its arguments, whose device decides on the kernel.
        names: ops to open besides the composite ones.
    """
    device = next((x.device.type for x in tree_leaves(args) if isinstance(x, Tensor)), "cpu")
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

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in self.NAMES:
            return func(*args, **kwargs)
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
