"""Which op a name means: Python functions, tensor methods, operators and ATen ops by one name.

People write an op's name in many ways: `relu`, `F.relu`, `Tensor.relu`, `aten::relu.default`,
`__add__`, `iadd`, `truediv`, `max_pool2d_with_indices`. Casts are decided where Python calls
PyTorch, so each of these names is mapped to the name of that call, the *canonical* name. Names of
in-place ops end in `_` and are separate ops.

There are two tables. `ALIASES` has other spellings, and the ATen ops that Python functions end in.
`INNER` has functions that are one C++ call and hide the op that a list names (an einsum is a bmm,
an LSTM a sequence of linear layers). If such a function is on no list itself, the entry of its
inner op applies.
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


def _spellings(text: str) -> dict[str, tuple[str, ...]]:
    """Other spelling -> canonical name, of entries `canonical: spelling spelling; ...`."""
    entries = (entry.split(":") for entry in text.replace("\n", ";").split(";") if entry)
    return {name: (target.strip(),) for target, names in entries for name in names.split()}


_PYTHON = """
div: truediv true_divide divide rtruediv rdiv; mul: multiply rmul; sub: subtract; add: radd
pow: rpow; matmul: rmatmul linalg_matmul; mm: dsmm spmm; hsmm: hspmm; sspaddmm: saddmm
floor_divide: floordiv rfloordiv; remainder: mod rmod; neg: negative; abs: absolute
cat: concat concatenate _cat; clamp: clip; outer: ger; gt: greater; ge: greater_equal; lt: less
le: less_equal; ne: not_equal; acos: arccos; asin: arcsin; atan: arctan; atan2: arctan2
acosh: arccosh; asinh: arcsinh; atanh: arctanh; trunc: fix; vstack: row_stack
linalg_matrix_power: matrix_power; linalg_det: det; linalg_inv: inverse; linalg_slogdet: slogdet
erf: special_erf; erfc: special_erfc; erfinv: special_erfinv; exp2: special_exp2
expm1: special_expm1; log1p: special_log1p; logit: special_logit; xlogy: special_xlogy
sinc: special_sinc; log_sigmoid: logsigmoid log_sigmoid_forward; sigmoid: special_expit
softmax: special_softmax _softmax _safe_softmax; log_softmax: special_log_softmax _log_softmax
logsumexp: special_logsumexp
"""
_IN_PLACE = """
add_: iadd; sub_: isub subtract_; mul_: imul multiply_; div_: itruediv idiv divide_ true_divide_
pow_: ipow; remainder_: imod; floor_divide_: ifloordiv
"""
_ATEN = """
conv2d: thnn_conv2d _slow_conv2d_forward slow_conv2d_forward
conv3d: slow_conv3d slow_conv3d_forward
batch_norm: native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm
batch_norm: _batch_norm_impl_index _batch_norm_with_update _batch_norm_no_update
layer_norm: native_layer_norm; group_norm: native_group_norm; rms_norm: _fused_rms_norm
dropout: native_dropout _fused_dropout; dropout2d: feature_dropout
cross_entropy: cross_entropy_loss
nll_loss: nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward
multilabel_margin_loss: multilabel_margin_loss_forward; max_pool1d: max_pool1d_with_indices
max_pool2d: max_pool2d_with_indices mkldnn_max_pool2d
max_pool3d: max_pool3d_with_indices mkldnn_max_pool3d; adaptive_avg_pool2d: _adaptive_avg_pool2d
adaptive_avg_pool3d: _adaptive_avg_pool3d; adaptive_max_pool2d: adaptive_max_pool2d_with_indices
adaptive_max_pool3d: adaptive_max_pool3d_with_indices
embedding_bag: _embedding_bag _embedding_bag_forward_only; lstm_cell: _thnn_fused_lstm_cell
gru_cell: _thnn_fused_gru_cell
scaled_dot_product_attention: _scaled_dot_product_flash_attention
scaled_dot_product_attention: _scaled_dot_product_attention_math
scaled_dot_product_attention: _scaled_dot_product_efficient_attention
scaled_dot_product_attention: _scaled_dot_product_flash_attention_for_cpu
scaled_dot_product_attention: _scaled_dot_product_cudnn_attention
ctc_loss: _ctc_loss _cudnn_ctc_loss; cdist: _cdist_forward; pdist: _pdist_forward
prelu: _prelu_kernel; bilinear: _trilinear; stack: _stack
grid_sampler: _grid_sampler_2d_cpu_fallback; T: numpy_T
"""
"""ATen ops that a Python function of one name ends in."""
_ANY_CONVOLUTION = """
_convolution convolution _convolution_mode cudnn_convolution mkldnn_convolution miopen_convolution
convolution_overrideable
"""

ALIASES: dict[str, tuple[str, ...]] = {
    **_spellings(_PYTHON + _IN_PLACE + _ATEN),
    **dict.fromkeys(_ANY_CONVOLUTION.split(), CONVOLUTIONS),
    **dict.fromkeys(("_cudnn_rnn", "mkldnn_rnn_layer"), RECURRENT),
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
"""A function that hides an op -> the ops whose entry applies to it; the first that has one."""

_PREFIX = re.compile(
    r"^(torch\.ops\.aten\.|aten(::|\.)|torch\.nn\.functional\.|torch\._C\._nn\.|F\.)"
)
_SUBMODULES = ("linalg", "special", "fft")
_OPERATOR = re.compile(r"^__(\w+?)__$")


def spelled(text: str) -> tuple[str, ...]:
    """The canonical names that a user's spelling means, known or not."""
    name = _PREFIX.sub("", text.strip())
    for prefix in ("torch.Tensor.", "Tensor.", "torch."):
        name = name.removeprefix(prefix)
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
    getter = name in ("__get__", "__set__")
    if getter or not isinstance(name, str) or not module.startswith("torch"):
        return None
    operator = _OPERATOR.match(name)
    return spelled(operator[1] if operator else name)[0]
