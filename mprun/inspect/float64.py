"""A float32 model's forward and backward pass in float64, for its true loss and gradients.

Inside `in_float64` weights, buffers and every tensor that the model's code makes or uses in
float32 are float64. Random numbers are drawn in float32 and then widened: a generator gives other
numbers in float64, and a model with other noise or another dropout would be another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mprun.precision._torch import DispatchMode, tree_map


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """`model` computes in float64; its state is restored afterwards.

    Parameters have no gradients at first. Gradients of the region are discarded at its end.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    parameters = [(p, p.data) for p in model.parameters() if p.dtype == torch.float32]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.dtype == torch.float32
    ]
    try:
        for p, _ in gradients:
            p.grad = None
        for p, value in parameters:
            p.data = value.double()
        for module, name, buffer in buffers:
            setattr(module, name, buffer.double())
        with _Draws(), _Widening():  # type: ignore[no-untyped-call]
            yield
    finally:
        for p, _ in gradients:
            p.grad = None
        for p, value in parameters:
            p.data = value
        for p, gradient in gradients:
            p.grad = gradient
        for module, name, buffer in buffers:
            setattr(module, name, buffer)


class _Widening(TorchFunctionMode):
    """Every function computes in float64 instead of float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # x.float() names no dtype among its arguments
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(_wide, (args, kwargs or {}))
        return tree_map(_wide, func(*args, **kwargs))


class _Draws(DispatchMode):
    """Random numbers that would be drawn in float64 are drawn in float32."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        low_args, low_kwargs = tree_map(_narrow, (args, kwargs))
        drawn = func(*low_args, **low_kwargs)
        if func is torch.ops.aten.native_dropout.default:  # it multiplies as well
            x, p, mask = args[0], args[1], drawn[1]
            return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
        if func.overloadpacket.__name__.endswith("_") and args[0] is not low_args[0]:
            return args[0].copy_(drawn)  # in place: the caller holds the float64 tensor
        return tree_map(_wide, drawn)


def _wide(x: Any) -> Any:
    if isinstance(x, Tensor) and x.dtype == torch.float32:
        return x.double()
    return torch.float64 if x is torch.float32 else x


def _narrow(x: Any) -> Any:
    if isinstance(x, Tensor) and x.dtype == torch.float64:
        return x.float()
    return torch.float32 if x is torch.float64 else x
