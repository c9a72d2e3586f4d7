"""Whose arithmetic an op is computed with: PyTorch's kernel, or mprun's stand-in around float32.

An arithmetic is a region, entered for the forward pass, the loss and the backward pass. The native
one does nothing. The others are dispatch modes: they see each op after autocast has cast its
inputs, forward and backward, and change those in their table.

TensorFloat-32 (NVIDIA, "TensorFloat-32 in the A100 GPU"): matmuls and convolutions take float32
inputs rounded to a 10-bit mantissa, 8-bit exponent as float32, products and sums in float32. Where
no hardware has it, rounding the inputs of those ops, gradients included, is the same format; the
order of the sums is the CPU's.

A kernel that holds several products (attention's fast path, `cdist`) is opened: the ops that it
calls are dispatched one by one and each is rounded. A kernel that cannot be opened computes in
float32; that is warned of once and listed in `substitutions`. Recurrent layers run without oneDNN's
and cuDNN's kernels, so that each of their products is an op of its own.

float16 on a CPU: some kernels are reference loops, from 20 to 700 times slower than float32
(convolution's backward on every CPU we tried, matmuls on those without AVX512-FP16), and oneDNN
trains no LSTM in float16. Such an op is computed in float32 and its result rounded to float16 once;
a kernel may sum in another order or round partial sums as well (`accumulation.py` measures it), so
the bits can differ.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mprun._torch import call_kernel, kernel_key, onednn_has_lstm, without_recurrent_kernels
from mprun.precision.formats import TF32, quantise

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
LOW = (torch.float16, torch.bfloat16)

# What a program can call directly besides: the ops of one library or one kind of convolution.
_OTHER_PRODUCTS: dict[str, tuple[int, ...]] = {
    "_addmm_activation": (1, 2),
    "_convolution": (0, 1),
    "_conv_depthwise2d": (0, 1),
    "_slow_conv2d_forward": (0, 1),
    "_slow_conv2d_backward": (0, 1, 2),
    "conv_depthwise3d": (0, 1),
    "cudnn_convolution": (0, 1),
    "cudnn_convolution_add_relu": (0, 1),
    "cudnn_convolution_relu": (0, 1),
    "cudnn_convolution_transpose": (0, 1),
    "miopen_convolution": (0, 1),
    "miopen_convolution_transpose": (0, 1),
    "miopen_depthwise_convolution": (0, 1),
    "mkldnn_convolution": (0, 1),
    "slow_conv3d_forward": (0, 1),
    "slow_conv_dilated2d": (0, 1),
    "slow_conv_dilated3d": (0, 1),
    "slow_conv_transpose2d": (0, 1),
    "slow_conv_transpose3d": (0, 1),
}

# Kernels that call products through the dispatcher: opened, each product is seen.
FAST_PATHS = frozenset({"_native_multi_head_attention", "_transformer_encoder_layer_fwd"})
OPENED = FAST_PATHS | {
    "torch_nn::_linear_cross_entropy_batch_chunked",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
    "_euclidean_dist",
    "_trilinear",
    "conv_tbc",
    "conv_tbc_backward",
    "linalg_matrix_exp",
    "linalg_matrix_sqrth",
    "linalg_pinv",
    "linalg_polar",
}
# Kernels that keep their products to themselves.
CLOSED = frozenset(
    {
        "_cudnn_attention_forward",
        "_cudnn_rnn",
        "_cudnn_rnn_backward",
        "_efficient_attention_backward",
        "_efficient_attention_forward",
        "_flash_attention_backward",
        "_flash_attention_forward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "miopen_rnn",
        "miopen_rnn_backward",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
    }
)


def variants(op: Any) -> list[Any]:
    """All overloads of an op, those with `out` and those in place too; arguments are as its own."""
    packets = [op.overloadpacket, getattr(aten, f"{op.overloadpacket.__name__}_", None)]
    return [getattr(packet, name) for packet in packets if packet for name in packet.overloads()]


def _products() -> dict[Any, tuple[int, ...]]:
    """Each op that multiplies, with the positions of the arguments that enter its products."""
    table = MATMULS | CONVOLUTIONS | CONVOLUTION_BACKWARD
    for name, positions in _OTHER_PRODUCTS.items():
        if (packet := getattr(aten, name, None)) is not None:  # of some versions of PyTorch
            table[getattr(packet, packet.overloads()[0])] = positions
    return {variant: positions for op, positions in table.items() for variant in variants(op)}


def opened(func: Any, args: Any, names: frozenset[str]) -> Callable[..., Any] | None:
    """The kernel of an op that consists of others; called inside a mode, it shows them to the mode.

    Below autograd, and in `torch.inference_mode`, PyTorch hands composite ops (`linear`, `matmul`)
    to a mode as they are.

    Args:
        func: the op.
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
        whole = getattr(func, "__name__", "") in self.NAMES
        with without_recurrent_kernels() if whole else nullcontext():
            return func(*args, **(kwargs or {}))


def round_to_tf32(x: Tensor) -> Tensor:
    """`x` (float32) rounded to a 10-bit mantissa; infinities and NaN are kept."""
    return quantise(x, TF32)


class Substitution(NamedTuple):
    """An op that is not computed by its own kernel."""

    op: str
    dtype: str
    reason: str


class Arithmetic(Protocol):
    """Gives the region forward pass, loss and backward pass run in."""

    @property
    def substitutions(self) -> tuple[Substitution, ...]:
        """Ops that are computed otherwise than their kernel would, where they occur."""

    occurred: set[Any]
    """Those that did occur, PyTorch's overloads or their names; it grows as steps are taken."""
    products: set[tuple[Any, torch.dtype]]
    """Matmuls and convolutions that their own kernels computed in 16 bits, with the dtype."""
    columns: Mapping[str, object]
    """Columns of a policy that the arithmetic decides, for the record."""

    def region(self) -> AbstractContextManager[object]:
        """A new region."""

    def begin_step(self, step: int) -> None:
        """Training step number `step` begins."""

    def end_step(self) -> None:
        """Its gradients are there; what follows is no training until the next `begin_step`."""


def op_name(op: Any) -> str:
    """An overload's name in records: "aten.mm", "aten.dot.out"."""
    return str(op).removesuffix(".default")


def occurred_substitutions(arithmetic: Arithmetic) -> list[Substitution]:
    """The substitutions whose op occurred; that of every op, "*", where any did."""
    names = {op_name(op) for op in arithmetic.occurred}
    return [s for s in arithmetic.substitutions if s.op in names or (s.op == "*" and names)]


class Stepless:
    """For arithmetics that are the same in every step."""

    def begin_step(self, step: int) -> None:
        pass

    def end_step(self) -> None:
        pass


class NativeArithmetic:
    """PyTorch's kernels.

    Args:
        watch: see in the first training step which products are computed in 16 bits.
    """

    substitutions: tuple[Substitution, ...] = ()
    columns: Mapping[str, object] = {}
    _nothing = nullcontext()

    def __init__(self, watch: bool = False) -> None:
        self.occurred: set[Any] = set()
        self.products: set[tuple[Any, torch.dtype]] = set()
        self._watch, self._in_step = watch, False

    def region(self) -> AbstractContextManager[object]:
        return _ProductsMode(self.products) if self._in_step else self._nothing

    def begin_step(self, step: int) -> None:
        self._in_step = self._watch

    def end_step(self) -> None:
        self._watch = self._in_step = False  # later steps have the same ops, and their full speed


class _ProductsMode(TorchDispatchMode):
    def __init__(self, products: set[tuple[Any, torch.dtype]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (positions := PRODUCTS.get(func)) is not None and args[positions[0]].dtype in LOW:
            self._products.add((func, args[positions[0]].dtype))
        return func(*args, **(kwargs or {}))


class EmulatedTf32(Stepless):
    """TF32 on any device: the inputs of matmuls and convolutions are rounded.

    `substitutions` lists the ops that met a kernel whose products could not be rounded.
    """

    columns: Mapping[str, object] = {"tf32": True}

    def __init__(self) -> None:
        self.substitutions: tuple[Substitution, ...] = ()
        self.occurred: set[Any] = set()
        self.products: set[tuple[Any, torch.dtype]] = set()

    @contextmanager
    def region(self) -> Iterator[None]:
        with unfused(), _Tf32Mode(self._not_rounded):
            yield

    def _not_rounded(self, name: str) -> None:
        """Warn of an op that was computed in float32, and list it; once."""
        if any(s.op == name for s in self.substitutions):
            return
        reason = "not rounded to TF32: its kernel keeps its products to itself"
        self.substitutions += (Substitution(name, "float32", reason),)
        self.occurred.add(name)
        warnings.warn(f"{name} is {reason}; it is computed in float32", stacklevel=2)


class _Tf32Mode(TorchDispatchMode):
    ROUNDED = _products()

    def __init__(self, not_rounded: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._not_rounded = not_rounded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (positions := self.ROUNDED.get(func)) is not None:
            result = func(*_with_tf32(args, positions), **kwargs)
            return _with_bias_gradient(result, args) if func in CONVOLUTION_BACKWARD else result
        if (kernel := opened(func, args, OPENED)) is not None:
            with self:
                return kernel(*args, **kwargs)
        if func.overloadpacket.__name__ in CLOSED and any(map(_is_float32, tree_leaves(args))):
            self._not_rounded(f"aten.{func.overloadpacket.__name__}")
        return func(*args, **kwargs)


def _with_tf32(args: Any, positions: tuple[int, ...]) -> list[Any]:
    """The arguments with the factors of the product rounded; sparse products have no TF32."""
    if any(isinstance(x, Tensor) and x.layout != torch.strided for x in args):
        return list(args)
    factors = {i for i in positions if i < len(args) and _is_float32(args[i])}
    return [round_to_tf32(x) if i in factors else x for i, x in enumerate(args)]


def _with_bias_gradient(result: Any, args: Any) -> Any:
    """A convolution's gradients, that of the bias from the gradient as it came: it is a sum."""
    gradient, mask = args[0], args[-1]
    if not mask[2]:
        return result
    return (*result[:2], gradient.sum([d for d in range(gradient.dim()) if d != 1]))


def _is_float32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32


class Float16ByFloat32(Stepless):
    """float16 on a CPU, with the ops that have no fast kernel computed in float32 and rounded.

    Args:
        matmuls: whether matmuls and forward convolutions are among them.
    """

    columns: Mapping[str, object] = {}

    def __init__(self, matmuls: bool) -> None:
        self.occurred: set[Any] = set()
        self.products: set[tuple[Any, torch.dtype]] = set()
        backward = Substitution(
            "aten.convolution_backward",
            "float16",
            "no fast float16 kernel on a CPU: computed in float32, its result rounded to float16",
        )
        self.substitutions: tuple[Substitution, ...] = (backward,)
        self._ops = set(CONVOLUTION_BACKWARD)
        if matmuls:
            self._ops |= {*MATMULS, *CONVOLUTIONS}
            slow = "no float16 instructions on this CPU: computed in float32, rounded to float16"
            ops = (*MATMULS, *CONVOLUTIONS)
            self.substitutions += tuple(Substitution(op_name(x), "float16", slow) for x in ops)

    def region(self) -> AbstractContextManager[object]:
        return _ByFloat32Mode(self._ops, self.occurred, self.products)


class _ByFloat32Mode(_ProductsMode):
    def __init__(
        self, ops: set[Any], occurred: set[Any], products: set[tuple[Any, torch.dtype]]
    ) -> None:
        super().__init__(products)
        self._ops = ops
        self._occurred = occurred

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in self._ops or args[0].dtype != torch.float16:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._occurred.add(func)
        wide = [a.float() if isinstance(a, Tensor) else a for a in args]
        result = func(*wide, **(kwargs or {}))
        if isinstance(result, Tensor):
            return result.half()
        return tuple(None if r is None else r.half() for r in result)


LSTM = (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
"""What an LSTM on a CPU is under autocast: oneDNN's primitive."""


def lstm_by_float32(
    arithmetic: Arithmetic, model: nn.Module, casting: str, device: torch.device
) -> Arithmetic:
    """`arithmetic`, with LSTMs in float32 where autocast would ask oneDNN for what it has not.

    oneDNN trains no LSTM in float16, and in bfloat16 on some CPUs only. Autocast asks for it all
    the same, and the model dies of "could not create a primitive descriptor".
    """
    asks = (
        device.type == "cpu" and casting == "autocast" and not isinstance(arithmetic, _LstmByOther)
    )
    if not asks or not any(isinstance(m, nn.LSTM) for m in model.modules()):
        return arithmetic
    missing = {d for d in (torch.float16, torch.bfloat16) if not onednn_has_lstm(d)}
    return _LstmByOther(arithmetic, missing) if missing else arithmetic


class _LstmByOther:
    """Another arithmetic, with LSTMs of some dtypes computed in float32 and rounded.

    Args:
        inner: the arithmetic for everything else.
        dtypes: those of the LSTMs.
    """

    def __init__(self, inner: Arithmetic, dtypes: Set[torch.dtype]) -> None:
        self._inner, self._dtypes = inner, dtypes
        self.substitutions = inner.substitutions
        self.occurred: set[Any] = getattr(inner, "occurred", set())
        self.products: set[Any] = getattr(inner, "products", set())
        self.columns: Mapping[str, object] = getattr(inner, "columns", {})

    def begin_step(self, step: int) -> None:
        self._inner.begin_step(step)

    def end_step(self) -> None:
        self._inner.end_step()

    @contextmanager
    def region(self) -> Iterator[None]:
        with self._inner.region(), _LstmMode(self._dtypes, self._substituted):
            yield

    def _substituted(self, func: Any, dtype: torch.dtype) -> None:
        if func not in self.occurred:
            self.occurred.add(func)
            low = str(dtype).removeprefix("torch.")
            reason = (
                f"oneDNN trains no {low} LSTM on this CPU: computed in float32, rounded to {low}"
            )
            self.substitutions += (Substitution(str(func).removesuffix(".default"), low, reason),)


class _LstmMode(TorchDispatchMode):
    def __init__(
        self, dtypes: Set[torch.dtype], substituted: Callable[[Any, torch.dtype], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtypes = dtypes
        self._substituted = substituted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in LSTM or args[0].dtype not in self._dtypes:
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        self._substituted(func, dtype)
        wide = [x.float() if isinstance(x, Tensor) and x.dtype == dtype else x for x in args]
        result = func(*wide, **(kwargs or {}))
        return tuple(x.to(dtype) if _is_float32(x) else x for x in result)
