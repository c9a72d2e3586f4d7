"""Which op a name means: Python functions, tensor methods, operators and ATen ops by one name.

People write an op's name as they know it: `relu`, `F.relu`, `Tensor.relu`, `aten::relu.default`,
`__add__`, `iadd`, `truediv`, `max_pool2d_with_indices`. Casts are decided where Python calls
PyTorch, so each of these names is mapped to the name of that call, the *canonical* name. Names of
in-place ops end in `_` and are ops of their own.

There are two tables. `ALIASES` has other spellings, and the ATen ops that Python functions end in.
`INNER` has functions that are one C++ call and hide the op that a list is about (an einsum is a
bmm, an LSTM a sequence of linear layers); if such a function is on no list itself, the entry of its
inner op holds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions

from mprun._torch import FUNCTION_NAMESPACES, OpOverload, OpOverloadPacket

CONVOLUTIONS = (
    *("conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
ATTENTION = ("scaled_dot_product_attention",)


def _all_to(names: str, *targets: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names.split(), targets)


ALIASES: dict[str, tuple[str, ...]] = {
    # other spellings of Python's
    **_all_to("truediv true_divide divide rtruediv rdiv", "div"),
    **_all_to("multiply rmul", "mul"),
    **_all_to("subtract", "sub"),
    **_all_to("radd", "add"),
    **_all_to("rpow", "pow"),
    **_all_to("rmatmul linalg_matmul", "matmul"),
    **_all_to("dsmm spmm", "mm"),
    **_all_to("hspmm", "hsmm"),
    **_all_to("saddmm", "sspaddmm"),
    **_all_to("floordiv rfloordiv", "floor_divide"),
    **_all_to("mod rmod", "remainder"),
    **_all_to("negative", "neg"),
    **_all_to("absolute", "abs"),
    **_all_to("concat concatenate _cat", "cat"),
    **_all_to("clip", "clamp"),
    **_all_to("ger", "outer"),
    **_all_to("greater", "gt"),
    **_all_to("greater_equal", "ge"),
    **_all_to("less", "lt"),
    **_all_to("less_equal", "le"),
    **_all_to("not_equal", "ne"),
    **_all_to("arccos", "acos"),
    **_all_to("arcsin", "asin"),
    **_all_to("arctan", "atan"),
    **_all_to("arctan2", "atan2"),
    **_all_to("arccosh", "acosh"),
    **_all_to("arcsinh", "asinh"),
    **_all_to("arctanh", "atanh"),
    **_all_to("fix", "trunc"),
    **_all_to("row_stack", "vstack"),
    **_all_to("matrix_power", "linalg_matrix_power"),
    **_all_to("det", "linalg_det"),
    **_all_to("inverse", "linalg_inv"),
    **_all_to("slogdet", "linalg_slogdet"),
    **{
        f"special_{name}": (name,)
        for name in ("erf", "erfc", "erfinv", "exp2", "expm1", "log1p", "logit", "xlogy", "sinc")
    },
    **_all_to("logsigmoid", "log_sigmoid"),
    **_all_to("special_expit", "sigmoid"),
    **_all_to("special_softmax _softmax _safe_softmax", "softmax"),
    **_all_to("special_log_softmax _log_softmax", "log_softmax"),
    **_all_to("special_logsumexp", "logsumexp"),
    # in-place operators
    **_all_to("iadd", "add_"),
    **_all_to("isub", "sub_"),
    **_all_to("imul", "mul_"),
    **_all_to("itruediv idiv divide_ true_divide_", "div_"),
    **_all_to("ipow", "pow_"),
    **_all_to("imod", "remainder_"),
    **_all_to("ifloordiv", "floor_divide_"),
    **_all_to("multiply_", "mul_"),
    **_all_to("subtract_", "sub_"),
    # ATen ops that a Python function ends in
    **_all_to("_convolution convolution _convolution_mode cudnn_convolution", *CONVOLUTIONS),
    **_all_to("mkldnn_convolution miopen_convolution convolution_overrideable", *CONVOLUTIONS),
    **_all_to("thnn_conv2d _slow_conv2d_forward slow_conv2d_forward", "conv2d"),
    **_all_to("slow_conv3d slow_conv3d_forward", "conv3d"),
    **_all_to("native_batch_norm _native_batch_norm_legit cudnn_batch_norm", "batch_norm"),
    **_all_to("miopen_batch_norm _batch_norm_impl_index", "batch_norm"),
    **_all_to("_batch_norm_with_update _batch_norm_no_update", "batch_norm"),
    **_all_to("native_layer_norm", "layer_norm"),
    **_all_to("native_group_norm", "group_norm"),
    **_all_to("_fused_rms_norm", "rms_norm"),
    **_all_to("native_dropout _fused_dropout", "dropout"),
    **_all_to("feature_dropout", "dropout2d"),
    **_all_to("cross_entropy_loss", "cross_entropy"),
    **_all_to("nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward", "nll_loss"),
    **_all_to("multilabel_margin_loss_forward", "multilabel_margin_loss"),
    **_all_to("max_pool1d_with_indices", "max_pool1d"),
    **_all_to("max_pool2d_with_indices mkldnn_max_pool2d", "max_pool2d"),
    **_all_to("max_pool3d_with_indices mkldnn_max_pool3d", "max_pool3d"),
    **_all_to("_adaptive_avg_pool2d", "adaptive_avg_pool2d"),
    **_all_to("_adaptive_avg_pool3d", "adaptive_avg_pool3d"),
    **_all_to("adaptive_max_pool2d_with_indices", "adaptive_max_pool2d"),
    **_all_to("adaptive_max_pool3d_with_indices", "adaptive_max_pool3d"),
    **_all_to("_embedding_bag _embedding_bag_forward_only", "embedding_bag"),
    **_all_to("_thnn_fused_lstm_cell", "lstm_cell"),
    **_all_to("_thnn_fused_gru_cell", "gru_cell"),
    **_all_to("_cudnn_rnn mkldnn_rnn_layer", *RECURRENT),
    **_all_to("_scaled_dot_product_flash_attention _scaled_dot_product_attention_math", *ATTENTION),
    **_all_to("_scaled_dot_product_efficient_attention", *ATTENTION),
    **_all_to("_scaled_dot_product_flash_attention_for_cpu", *ATTENTION),
    **_all_to("_scaled_dot_product_cudnn_attention", *ATTENTION),
    **_all_to("_ctc_loss _cudnn_ctc_loss", "ctc_loss"),
    **_all_to("_cdist_forward", "cdist"),
    **_all_to("_pdist_forward", "pdist"),
    **_all_to("_prelu_kernel", "prelu"),
    **_all_to("_trilinear", "bilinear"),
    **_all_to("_stack", "stack"),
    **_all_to("log_sigmoid_forward", "log_sigmoid"),
    **_all_to("_grid_sampler_2d_cpu_fallback", "grid_sampler"),
    **_all_to("numpy_T", "T"),
}
"""Another spelling -> the canonical names it means."""

INNER: dict[str, tuple[str, ...]] = {
    "rsub": ("sub",),
    "linear": ("addmm", "mm"),
    "matmul": ("mm", "bmm"),
    "einsum": ("bmm",),
    "tensordot": ("mm",),
    "inner": ("mm",),
    "chain_matmul": ("mm",),
    "linalg_multi_dot": ("mm",),
    "linalg_matrix_power": ("mm",),
    "bilinear": ("bmm",),
    "scaled_dot_product_attention": ("bmm", "matmul"),
    "_native_multi_head_attention": ("linear", "addmm"),
    **dict.fromkeys((*RECURRENT, "lstm_cell", "gru_cell"), ("linear", "addmm")),
    **dict.fromkeys(("rnn_tanh_cell", "rnn_relu_cell"), ("linear", "addmm")),
    "cross_entropy": ("log_softmax",),
    "softmin": ("softmax",),
}
"""A function that hides an op -> the ops whose entry holds for it, the first that has one."""

_PREFIX = re.compile(
    r"^(torch\.ops\.aten\.|aten(::|\.)|torch\.nn\.functional\.|torch\._C\._nn\.|F\.)"
)
_NAMESPACES = {"torch.Tensor.": "", "Tensor.": "", "torch.": ""}
_SUBMODULES = ("linalg", "special", "fft")
_OPERATOR = re.compile(r"^__(\w+?)__$")


def spelled(text: str) -> tuple[str, ...]:
    """The canonical names that a user's spelling means, known or not."""
    name = _PREFIX.sub("", text.strip())
    for prefix, to in _NAMESPACES.items():
        name = to + name.removeprefix(prefix) if name.startswith(prefix) else name
    first, _, rest = name.partition(".")
    # torch.linalg.inv is linalg_inv in ATen; otherwise what follows a dot is an overload.
    name = f"{first}_{rest.partition('.')[0]}" if first in _SUBMODULES and rest else first
    if (operator := _OPERATOR.match(name)) is not None:
        name = operator[1]
    return ALIASES.get(name, (name,))


@functools.cache
def known() -> frozenset[str]:
    """Every canonical name that a call can have."""
    spaces: tuple[Any, ...] = (*FUNCTION_NAMESPACES, Tensor, F)
    names = {n for space in spaces for n in dir(space) if callable(getattr(space, n, None))}
    groups = get_overridable_functions().values()
    names |= {name_of(f) or "" for functions in groups for f in functions}
    plain = (n for n in names if n and not n.startswith("__") and n not in _NOT_OPS)
    canonical = {target for name in plain for target in spelled(name)}
    return frozenset(canonical | {t for targets in ALIASES.values() for t in targets})


_NOT_OPS = {"Tensor", "boolean_dispatch", "handle_torch_function", "has_torch_function", "wraps"}


def name_of(function: Callable[..., Any]) -> str | None:
    """The canonical name of a function, or None for one that is no op, such as a getter."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        return spelled(str(function))[0]
    name = getattr(function, "__name__", None)
    module = getattr(function, "__module__", None) or "torch"
    if (
        not isinstance(name, str)
        or not module.startswith("torch")
        or name in ("__get__", "__set__")
    ):
        return None
    operator = _OPERATOR.match(name)
    return spelled(operator[1] if operator else name)[0]
