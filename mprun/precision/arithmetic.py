"""How ops are computed: by PyTorch's kernels, by an emulation, or in float32 as a fallback.

An arithmetic is a region, entered for the forward pass, the loss and the backward pass. The native
one changes nothing. The others are dispatch modes: they see each op after autocast has cast its
inputs. `emulate.py` emulates 16 bits; this file has TF32 and the fallback to float32.

**float16 on a CPU**: some kernels are reference loops, 20 to 700 times slower than float32. oneDNN
trains no LSTM in float16, and in bfloat16 on some CPUs only. The fallback computes such an op in
float32 and rounds its result once; a kernel may sum in another order, so the bits can differ.

**TensorFloat-32** (NVIDIA, "TensorFloat-32 in the A100 GPU"): matmuls and convolutions take float32
inputs rounded to a 10-bit mantissa. Without such hardware mprun rounds the inputs of those ops,
gradients included. An op that cannot be opened (`products.py`) is in `substitutions`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.precision._torch import DispatchMode, aten_packets, onednn_has_lstm, tree_leaves
from mprun.precision.formats import TF32, quantise
from mprun.precision.gemms import StepBits
from mprun.precision.policy import dtype_name
from mprun.precision.products import (
    CLOSED,
    CONVOLUTION_BACKWARD,
    CONVOLUTIONS,
    LOW,
    MATMULS,
    OPENED,
    PRODUCTS,
    all_products,
    is_float32,
    opened,
    recorded_name,
    unfused,
)


class OpSubstitution(NamedTuple):
    """An op that is not computed by its own kernel."""

    op: str
    dtype: str
    reason: str


class Arithmetic:
    """What every arithmetic has."""

    execution = "native"
    """native, or emulated where mprun computes the format itself."""
    columns: Mapping[str, object] = {}
    """Columns of a policy that the arithmetic decides, for the record."""
    substitutions: tuple[OpSubstitution, ...] = ()
    """Ops that their own kernel does not compute, if they occur."""
    bits: StepBits | None = None
    """Random bits for products with formats of 8 bits or fewer."""

    def __init__(self) -> None:
        self.occurred: set[Any] = set()
        """Substituted ops that occurred so far: PyTorch's overloads or names."""
        self.products: set[tuple[Any, torch.dtype]] = set()
        """Matmuls and convolutions that their own kernels computed in 16 bits, and the dtypes."""

    def region(self) -> AbstractContextManager[object]:
        """A new region."""
        return nullcontext()

    def begin_step(self, step: int) -> None:
        """Training step number `step` begins."""

    def end_step(self) -> None:
        """Its gradients are complete: no training follows until `begin_step` or `resume_step`."""

    def resume_step(self) -> None:
        """Another pass of the same step follows: several optimizers take turns in it."""

    def substitute(self, op: Any, dtype: str, reason: str) -> bool:
        """Add an op to `substitutions` while it runs; True the first time."""
        if any(s.op == recorded_name(op) for s in self.substitutions):
            return False
        self.substitutions += (OpSubstitution(recorded_name(op), dtype, reason),)
        self.occurred.add(op)
        return True


def occurred_substitutions(arithmetic: Arithmetic) -> list[OpSubstitution]:
    """The substitutions whose op occurred; "*" stands for any op."""
    names = {recorded_name(op) for op in arithmetic.occurred}
    return [s for s in arithmetic.substitutions if s.op in names or (s.op == "*" and names)]


class WrappedArithmetic(Arithmetic):
    """Another arithmetic with a second region inside its own; its modes see ops first."""

    def __init__(
        self, inner: Arithmetic, region: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.inner, self.execution = inner, inner.execution
        self.columns, self.occurred, self.products = inner.columns, inner.occurred, inner.products
        self.bits = inner.bits
        self._region = region

    @property
    def substitutions(self) -> tuple[OpSubstitution, ...]:  # type: ignore[override]
        return self.inner.substitutions

    @contextmanager
    def region(self) -> Iterator[None]:
        with self.inner.region(), self._region():
            yield

    def begin_step(self, step: int) -> None:
        self.inner.begin_step(step)

    def end_step(self) -> None:
        self.inner.end_step()

    def resume_step(self) -> None:
        self.inner.resume_step()

    def substitute(self, op: Any, dtype: str, reason: str) -> bool:
        return self.inner.substitute(op, dtype, reason)


class NativeArithmetic(Arithmetic):
    """PyTorch's kernels; `watch` lists in the first training step which products are in 16 bits."""

    def __init__(self, watch: bool = False) -> None:
        super().__init__()
        self._watch, self._in_step = watch, False

    def region(self) -> AbstractContextManager[object]:
        return _KernelMode(self.products) if self._in_step else nullcontext()

    def begin_step(self, step: int) -> None:
        self._in_step = self._watch

    def end_step(self) -> None:
        self._watch = self._in_step = False  # later steps have the same ops, and their full speed


class EmulatedProducts(Arithmetic):
    """PyTorch's kernels, but for linear layers whose products `gemms.py` computes."""

    execution = "emulated"
    bits: StepBits

    def __init__(self, gemms: str, seed: int) -> None:
        super().__init__()
        self.bits = StepBits(seed)
        reason = "emulated: factors rounded to the format, products and sums in float32"
        self.substitutions = (OpSubstitution("linear", gemms, reason),)
        # No mode sees the layers that compute it: they are replaced, and each one runs at every
        # step
        self.occurred.add("linear")

    def begin_step(self, step: int) -> None:
        self.bits.begin_step(step)


class Float16Fallback(Arithmetic):
    """float16 on a CPU; ops without a fast kernel are computed in float32 and rounded.

    `matmuls`: whether matmuls and forward convolutions are among them.
    """

    def __init__(self, matmuls: bool) -> None:
        super().__init__()
        missing = (
            "no fast float16 kernel on a CPU: computed in float32, its result rounded to float16"
        )
        slow = "no float16 instructions on this CPU: computed in float32, rounded to float16"
        reasons = dict.fromkeys(CONVOLUTION_BACKWARD, missing)
        reasons |= dict.fromkeys([*MATMULS, *CONVOLUTIONS], slow) if matmuls else {}
        self.substitutions = tuple(
            OpSubstitution(recorded_name(op), "float16", reason) for op, reason in reasons.items()
        )
        self._fallback = {op: frozenset({torch.float16}) for op in reasons}

    def region(self) -> AbstractContextManager[object]:
        return _KernelMode(self.products, self._fallback, lambda op, _: self.occurred.add(op))


class _KernelMode(DispatchMode):
    """Lists products in 16 bits, and computes ops of a table in float32.

    `fallback` maps an op to the dtypes of its first argument for which that is done; `on_fallback`
    is called with both.
    """

    def __init__(
        self,
        products: set[tuple[Any, torch.dtype]],
        fallback: Mapping[Any, Set[torch.dtype]] | None = None,
        on_fallback: Callable[[Any, torch.dtype], None] = lambda *_: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = products
        self._fallback = fallback or {}
        self._on_fallback = on_fallback

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._fallback and (dtype := args[0].dtype) in self._fallback[func]:
            self._on_fallback(func, dtype)
            return _in_float32(func, dtype, args, kwargs)
        if (positions := PRODUCTS.get(func)) is not None and args[positions[0]].dtype in LOW:
            self._products.add((func, args[positions[0]].dtype))
        return func(*args, **kwargs)


def products_in_float32() -> AbstractContextManager[object]:
    """Inside, 16-bit products take no longer than float32's, on any CPU.

    They have the dtypes and shapes of native ones; each result is rounded once.
    """
    return _KernelMode(set(), dict.fromkeys(PRODUCTS, frozenset(LOW)))


def _in_float32(func: Any, dtype: torch.dtype, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The result of an op on arguments of `dtype`, computed in float32 and rounded to `dtype`."""
    wide = [x.float() if isinstance(x, Tensor) and x.dtype == dtype else x for x in args]
    result = func(*wide, **kwargs)
    if isinstance(result, Tensor):
        return result.to(dtype)
    return tuple(x.to(dtype) if is_float32(x) else x for x in result)


# What an LSTM on a CPU is under autocast: oneDNN's primitive
LSTM = aten_packets("mkldnn_rnn_layer mkldnn_rnn_layer_backward")


def with_lstm_fallback(
    arithmetic: Arithmetic, model: nn.Module, casting: str, device: torch.device
) -> Arithmetic:
    """`arithmetic`, with LSTMs in float32 where autocast would use a primitive oneDNN lacks.

    Autocast calls the primitive whether it exists or not, and the model fails with "could not
    create a primitive descriptor".
    """
    used = any(isinstance(m, nn.LSTM) for m in model.modules())
    if device.type != "cpu" or casting != "autocast" or not used:
        return arithmetic
    missing = frozenset(d for d in LOW if not onednn_has_lstm(d))
    if not missing or isinstance(arithmetic, LstmFallback):
        return arithmetic
    return LstmFallback(arithmetic, missing)


class LstmFallback(WrappedArithmetic):
    """Another arithmetic, with LSTMs of some dtypes computed in float32 and rounded."""

    def __init__(self, inner: Arithmetic, dtypes: Set[torch.dtype]) -> None:
        fallback = {packet.default: dtypes for packet in LSTM}
        # The set is not read: the products are listed by the arithmetic inside
        super().__init__(inner, lambda: _KernelMode(set(), fallback, self._on_fallback))

    def _on_fallback(self, op: Any, dtype: torch.dtype) -> None:
        low = dtype_name(dtype)
        reason = f"oneDNN trains no {low} LSTM on this CPU: computed in float32, rounded to {low}"
        self.substitute(op, low, reason)


def round_to_tf32(x: Tensor) -> Tensor:
    """`x` (float32) rounded to a 10-bit mantissa, to nearest, ties to even; NaN stay NaN."""
    return quantise(x, TF32)


NOT_ROUNDED = "not rounded to TF32: its kernel keeps its products to itself"


class EmulatedTf32(Arithmetic):
    """Rounds the inputs of matmuls and convolutions to TF32, on any device."""

    execution = "emulated"
    columns: Mapping[str, object] = {"tf32": True}

    @contextmanager
    def region(self) -> Iterator[None]:
        with unfused(), _Tf32Mode(self):
            yield


class _Tf32Mode(DispatchMode):
    ROUNDED = all_products()

    def __init__(self, arithmetic: EmulatedTf32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arithmetic = arithmetic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (positions := self.ROUNDED.get(func)) is not None:
            result = func(*_with_tf32(args, positions), **kwargs)
            return _with_bias_gradient(result, args) if func in CONVOLUTION_BACKWARD else result
        if (kernel := opened(func, args, OPENED)) is not None:
            with self:
                return kernel(*args, **kwargs)
        if func.overloadpacket.__name__ in CLOSED and any(map(is_float32, tree_leaves(args))):
            name = f"aten.{func.overloadpacket.__name__}"
            if self._arithmetic.substitute(name, "float32", NOT_ROUNDED):
                warnings.warn(f"{name} is {NOT_ROUNDED}; it is computed in float32", stacklevel=2)
        return func(*args, **kwargs)


def _with_tf32(args: Any, positions: tuple[int, ...]) -> list[Any]:
    """The arguments with the factors of the product rounded; sparse products have no TF32."""
    if any(isinstance(x, Tensor) and x.layout != torch.strided for x in args):
        return list(args)
    factors = {i for i in positions if i < len(args) and is_float32(args[i])}
    return [round_to_tf32(x) if i in factors else x for i, x in enumerate(args)]


def _with_bias_gradient(result: Any, args: Any) -> Any:
    """A convolution's gradients; that of the bias is a sum of unrounded output gradients."""
    gradient, mask = args[0], args[-1]
    if not mask[2]:
        return result
    return (*result[:2], gradient.sum([d for d in range(gradient.dim()) if d != 1]))
