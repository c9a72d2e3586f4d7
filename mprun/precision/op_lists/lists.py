"""Op lists: which ops compute in the lower dtype, in float32, in the widest of their inputs.

A list is data: names, one to an op, from a configuration or a file (`records/op_list_files.py`); a
name that no op has is in `OpLists.unknown` with the nearest known one. People write an op's name in
many ways (`F.relu`, `aten::relu.default`, `__add__`). Casts are decided where Python calls PyTorch,
so each spelling is mapped to the name of that call, the *canonical* name: `ALIASES`. `INNER` has
functions that are one C++ call and hide the op that a list names (an einsum is a bmm). The shipped
lists are `conf/op_lists/*.yaml`.

**Custom autograd functions** get what `torch.amp` does for them: with the decorators `custom_fwd`
and `custom_bwd`, backward runs in the region of forward; with `cast_inputs` forward runs on inputs
of that dtype, and nothing is cast in either. Without them the error is raised with the remedy.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from inspect import getclosurevars
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml  # type: ignore[import-untyped]
from torch import Tensor
from torch.autograd import Function
from torch.overrides import get_overridable_functions

from mprun.errors import hint, nearest
from mprun.precision._torch import FUNCTION_NAMESPACES, OpOverload, OpOverloadPacket, autocast_has
from mprun.precision.nested import map_tensors
from mprun.records.op_list_files import KINDS, Entry

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
# ATen ops that a Python function of one name ends in
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
_ANY_CONVOLUTION = """
_convolution convolution _convolution_mode cudnn_convolution mkldnn_convolution miopen_convolution
convolution_overrideable
"""

# Another spelling -> the canonical names it means
ALIASES: dict[str, tuple[str, ...]] = {
    **_spellings(_PYTHON + _IN_PLACE + _ATEN),
    **dict.fromkeys(_ANY_CONVOLUTION.split(), CONVOLUTIONS),
    **dict.fromkeys(("_cudnn_rnn", "mkldnn_rnn_layer"), RECURRENT),
}

# A function that hides an op -> the ops whose entry applies to it; the first that has one
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


# Names in the searched namespaces that are helpers
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


class Unknown(NamedTuple):
    """A name that no op has."""

    entry: Entry

    @property
    def nearest(self) -> str | None:
        """The known name most like it; computed when it is needed, as it takes milliseconds."""
        return nearest(spelled(self.entry.text)[0].lower(), known())

    def __str__(self) -> str:
        meant = f"; did you mean '{self.nearest}'?" if self.nearest else ""
        return f"{self.entry.where}: no op is named '{self.entry.text}'{meant}"


@dataclass(frozen=True)
class OpLists:
    """Lists with their names brought to canonical ones."""

    rules: Mapping[str, str]
    """Canonical name to `lower`, `fp32` or `promote`."""
    first_input: bool
    """Whether an op on no list casts its inputs to the dtype of the first one, or PyTorch's own
    promotion is left to it."""
    unknown: tuple[Unknown, ...] = field(default=())
    """Names that were left out."""


def op_lists(
    lower: Iterable[Entry | str],
    fp32: Iterable[Entry | str],
    promote: Iterable[Entry | str] = (),
    first_input: bool = True,
    strict: bool = False,
) -> OpLists:
    """Lists from names.

    A name on `promote` that is on another list too is that other list's (HMP: the two lists take
    precedence over the third).

    Args:
        lower: ops that compute in the lower dtype.
        fp32: ops that compute in float32.
        promote: ops that compute in the widest dtype among their inputs.
        first_input: what becomes of an op on no list, see `OpLists`.
        strict: refuse a name that no op has. Otherwise it is left out; a name given as text, in a
            program's own code, is warned of.

    Raises:
        ValueError: one op is on both `lower` and `fp32`; the message names both entries. With
            `strict`, a name that no op has.
    """
    entries: dict[str, tuple[str, Entry]] = {}
    unknown: dict[str, Unknown] = {}
    for kind, names in zip(KINDS, (lower, fp32, promote), strict=True):
        for item in names:
            entry = Entry(item, f"{kind} list") if isinstance(item, str) else item
            canonical = spelled(entry.text)
            if not any(name in known() for name in canonical) and entry.text not in unknown:
                unknown[entry.text] = Unknown(entry)
                if strict:
                    raise ValueError(str(unknown[entry.text]))
                if isinstance(item, str):
                    warnings.warn(f"a name is left out: {unknown[entry.text]}", stacklevel=2)
            for name in canonical:
                before, other = entries.setdefault(name, (kind, entry))
                if before != kind and kind != "promote":
                    same = "" if other.text == entry.text else f" and '{other.text}', the same op"
                    raise ValueError(
                        f"'{entry.text}'{same}: on the {before} list ({other.where}) and on the "
                        f"{kind} list ({entry.where}); an op is on one of them: take it off the "
                        "other, or bring both files"
                    )
    # Of several meanings of a spelling, this version of PyTorch may have some only
    rules = {name: kind for name, (kind, _) in entries.items() if name in known()}
    return OpLists(rules, first_input, tuple(unknown.values()))


# Names that PyTorch's own lists have only up to 2.13, or only after 2.11
NOT_EVERYWHERE = ("cholesky", "linalg_matrix_sqrth", "qr", "rms_norm")


def of_this_version(lists: str, names: Iterable[str]) -> list[str]:
    """The names of a list, of PyTorch's own ones without what autocast does not decide here."""
    native = lists.startswith("native")
    return [n for n in names if not native or n not in NOT_EVERYWHERE or autocast_has(n)]


SHIPPED = ("hmp", "hmp_resnet50", "native", "native_uniform")


def shipped_lists(name: str, device_type: str) -> OpLists:
    """The shipped lists of a name; PyTorch's own differ between the device types cpu and cuda.

    Raises `ValueError` if no lists have this name.
    """
    if name not in SHIPPED:
        legal = ", ".join(SHIPPED)
        raise ValueError(
            f"no op lists are named '{name}'{hint(name, SHIPPED)}; legal: {legal}, or the lists "
            "that mprun.precision.op_lists(...) gives"
        )
    path = files("mprun.conf") / "op_lists" / f"{name}.yaml"
    section: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["op_lists"]
    lower, fp32, promote = (
        [
            Entry(op, f"op_lists={name}")
            for op in of_this_version(name, section.get(f"{device_type}_{kind}", section[kind]))
        ]
        for kind in KINDS
    )
    return op_lists(lower, fp32, promote, section.get("unlisted", "first_input") == "first_input")


# Makes the region a backward pass runs in
RegionFactory = Callable[[], AbstractContextManager[object]]

REMEDY = (
    "{name}.backward met tensors of several dtypes: op lists cast in its forward pass and not in "
    "its backward pass; decorate forward with torch.amp.custom_fwd(device_type={device!r}) and "
    "backward with torch.amp.custom_bwd(device_type={device!r})"
)


@contextmanager
def custom_functions_cast(
    current: Callable[[], RegionFactory | None], off: RegionFactory
) -> Iterator[None]:
    """Inside, `Function.apply` takes custom functions' backward passes into regions.

    `current` makes the region that a backward pass would run in (None: nothing is cast now), `off`
    one without casts.
    """
    before = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        region = None if torch.compiler.is_compiling() else current()
        # PyTorch's functions and mprun's follow the dtypes that they get
        if region is None or cls.__module__.partition(".")[0] in ("torch", "mprun"):
            return before.__get__(None, cls)(*args, **kwargs)
        return before.__get__(None, _in_regions(cls, region, off))(*args, **kwargs)

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        Function.apply = before


@functools.lru_cache(maxsize=256)
def _in_regions(cls: type[Function], region: RegionFactory, off: RegionFactory) -> type[Function]:
    """A subclass of `cls` whose passes run in their regions."""
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    forward, backward = cls.forward, cls.backward
    decorated = _decorator(forward, "decorate_fwd")
    cast_inputs = None if decorated is None else decorated["cast_inputs"]
    if decorated is None or _decorator(backward, "decorate_bwd") is None:
        body["backward"] = staticmethod(_with_remedy(backward, cls.__name__))
    elif cast_inputs is None:

        def backward_in_region(ctx: Any, *gradients: Any) -> Any:
            with region():
                return backward(ctx, *gradients)

        body["backward"] = staticmethod(backward_in_region)
    if cast_inputs is not None:

        def forward_on_casts(ctx: Any, *args: Any) -> Any:
            args = map_tensors(lambda x: _to(x, cast_inputs), args)
            with off():
                return forward(ctx, *args)

        body["forward"] = staticmethod(forward_on_casts)
    return type(cls.__name__, (cls,), body)


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `custom_fwd` casts: floating tensors but those in float64."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _decorator(function: Any, name: str) -> dict[str, Any] | None:
    """The arguments of torch.amp's decorator around a function; None where it has none."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_name == name and code.co_filename == _AMP:
            return dict(getclosurevars(function).nonlocals)
        function = getattr(function, "__wrapped__", None)
    return None


_AMP = torch.amp.custom_fwd.__code__.co_filename


def _with_remedy(backward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`backward` whose error about dtypes names the remedy."""

    @functools.wraps(backward)
    def with_remedy(ctx: Any, *gradients: Any) -> Any:
        try:
            return backward(ctx, *gradients)
        except RuntimeError as error:
            if "dtype" not in str(error) and "scalar type" not in str(error):
                raise
            device = next((g.device.type for g in gradients if isinstance(g, Tensor)), "cpu")
            raise RuntimeError(f"{error}\n{REMEDY.format(name=name, device=device)}") from error

    return with_remedy
