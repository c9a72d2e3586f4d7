"""Whose arithmetic an op is computed with: PyTorch's kernel, or mprun's stand-in around float32.

An arithmetic is a region, entered for the forward pass, the loss and the backward pass. The native
one does nothing. The others are dispatch modes: they see each op after autocast has cast its
inputs, forward and backward, and change those in their table.

TensorFloat-32 (NVIDIA, "TensorFloat-32 in the A100 GPU"): matmuls and convolutions take float32
inputs rounded to a 10-bit mantissa, 8-bit exponent as float32, products and sums in float32. Where
no hardware has it, rounding the inputs of those ops, gradients included, is the same format; the
order of the sums is the CPU's.

float16 on a CPU: most ops have kernels for it, some of which are reference loops, from 20 to 700
times slower than float32 (convolution's backward on every CPU we tried, matmuls on those without
AVX512-FP16). Such an op is computed in float32 and its result rounded to float16 once; a kernel may
sum in another order or round partial sums as well (`accumulation.py` measures it), so the bits can
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

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


def round_to_tf32(x: Tensor) -> Tensor:
    """`x` (float32) rounded to a 10-bit mantissa, to nearest, ties to even.

    A float32 has 23 mantissa bits, the last 13 of which go. Adding half of the last kept bit's
    weight, less one, plus that bit, and clearing the 13 rounds to nearest even on the bit pattern;
    a carry runs into the exponent, and from the largest one into infinity, as it should.
    Infinities and NaN are kept.
    """
    bits = x.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


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
    """TF32 on any device: the inputs of matmuls and convolutions are rounded."""

    substitutions: tuple[Substitution, ...] = ()
    columns: Mapping[str, object] = {"tf32": True}

    def __init__(self) -> None:
        self.occurred: set[Any] = set()
        self.products: set[tuple[Any, torch.dtype]] = set()

    @contextmanager
    def region(self) -> Iterator[None]:
        # A fused attention would hide its matmuls from the mode.
        with sdpa_kernel(SDPBackend.MATH), _Tf32Mode():
            yield


class _Tf32Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (positions := PRODUCTS.get(func)) is not None:
            args = list(args)
            for i in positions:
                if args[i].dtype == torch.float32:
                    args[i] = round_to_tf32(args[i])
        return func(*args, **(kwargs or {}))


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
