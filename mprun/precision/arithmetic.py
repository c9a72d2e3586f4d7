"""Whose arithmetic an op is computed with: PyTorch's kernel, or mprun's stand-in around float32.

An arithmetic is a region, entered for the forward pass, the loss and the backward pass. The native
one does nothing. The others are dispatch modes: they see each op after autocast has cast its
inputs, forward and backward, and change those in their table.

TensorFloat-32 (NVIDIA, "TensorFloat-32 in the A100 GPU"): matmuls and convolutions take float32
inputs rounded to a 10-bit mantissa, 8-bit exponent as float32, products and sums in float32. Where
no hardware has it, rounding the inputs of those ops, gradients included, is the same format; the
order of the sums is the CPU's.

float16 on a CPU: kernels exist for every op, but some are reference loops, from 20 to 700 times
slower than float32 (convolution's backward on every CPU we tried, matmuls on those without
AVX512-FP16). Such an op is computed in float32 and its result rounded to float16 once; a kernel may
sum in another order or round partial sums as well, so the bits can differ.
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

    substitutions: tuple[Substitution, ...]
    """Ops computed otherwise than their kernel would, for the record."""

    def region(self) -> AbstractContextManager[object]:
        """A new region."""

    def begin_step(self, step: int) -> None:
        """Training step number `step` begins."""

    def end_step(self) -> None:
        """Its gradients are there; what follows is no training until the next `begin_step`."""


class Stepless:
    """For arithmetics that are the same in every step."""

    def begin_step(self, step: int) -> None:
        pass

    def end_step(self) -> None:
        pass


class NativeArithmetic(Stepless):
    """PyTorch's kernels."""

    substitutions: tuple[Substitution, ...] = ()
    _nothing = nullcontext()

    def region(self) -> AbstractContextManager[object]:
        return self._nothing


class EmulatedTf32(Stepless):
    """TF32 on any device: the inputs of matmuls and convolutions are rounded."""

    substitutions: tuple[Substitution, ...] = ()

    @contextmanager
    def region(self) -> Iterator[None]:
        # A fused attention would hide its matmuls from the mode.
        with sdpa_kernel(SDPBackend.MATH), _Tf32Mode():
            yield


class _Tf32Mode(TorchDispatchMode):
    ROUNDED = MATMULS | CONVOLUTIONS | CONVOLUTION_BACKWARD

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (positions := self.ROUNDED.get(func)) is not None:
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

    def __init__(self, matmuls: bool) -> None:
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
            names = [str(op).removesuffix(".default") for op in (*MATMULS, *CONVOLUTIONS)]
            self.substitutions += tuple(Substitution(n, "float16", slow) for n in names)

    def region(self) -> AbstractContextManager[object]:
        return _ByFloat32Mode(self._ops)


class _ByFloat32Mode(TorchDispatchMode):
    def __init__(self, ops: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops = ops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in self._ops or args[0].dtype != torch.float16:
            return func(*args, **(kwargs or {}))
        wide = [a.float() if isinstance(a, Tensor) else a for a in args]
        result = func(*wide, **(kwargs or {}))
        if isinstance(result, Tensor):
            return result.half()
        return tuple(None if r is None else r.half() for r in result)
