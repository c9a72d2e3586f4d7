"""TensorFloat-32 on any device.

NVIDIA, "TensorFloat-32 in the A100 GPU": matmuls and convolutions take float32 inputs rounded to a
10-bit mantissa, with float32's 8-bit exponent; products and sums are float32. Without such hardware
mprun rounds the inputs of those ops, gradients included. The format is the same; the order of the
sums is the CPU's.

A kernel that cannot be opened (`products.py`) computes in float32. mprun warns of it once and lists
it in `substitutions`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mprun._torch import DispatchMode, tree_leaves
from mprun.precision.arithmetic import Arithmetic
from mprun.precision.formats import TF32, quantise
from mprun.precision.products import (
    CLOSED,
    CONVOLUTION_BACKWARD,
    OPENED,
    all_products,
    is_float32,
    opened,
    unfused,
)


def round_to_tf32(x: Tensor) -> Tensor:
    """`x` (float32) rounded to a 10-bit mantissa, to nearest, ties to even; NaN stay NaN."""
    return quantise(x, TF32)


class EmulatedTf32(Arithmetic):
    """Rounds the inputs of matmuls and convolutions to TF32, on any device."""

    execution = "emulated"
    columns: Mapping[str, object] = {"tf32": True}

    @contextmanager
    def region(self) -> Iterator[None]:
        with unfused(), _Tf32Mode(self):
            yield

    def not_rounded(self, name: str) -> None:
        """Report an op that was computed in float32, once."""
        reason = "not rounded to TF32: its kernel keeps its products to itself"
        if self.substitute(name, "float32", reason):
            warnings.warn(f"{name} is {reason}; it is computed in float32", stacklevel=2)


class _Tf32Mode(DispatchMode):
    ROUNDED = all_products()

    def __init__(self, arithmetic: EmulatedTf32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arithmetic = arithmetic

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
        if func.overloadpacket.__name__ in CLOSED and any(map(is_float32, tree_leaves(args))):
            self._arithmetic.not_rounded(f"aten.{func.overloadpacket.__name__}")
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
