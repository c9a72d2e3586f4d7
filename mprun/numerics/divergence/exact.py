"""A model in float64 in which casts do nothing, and in which results may be rounded.

A rounding that a model's code asks for (`x.bfloat16().float()`) is an error of that code here, so
casts between floating dtypes return float64. With `rounding_to` each result is rounded to a dtype:
the error of such a pass is what the dtype explains, cancellation and the growth of errors included,
which no formula knows for any code. Sums inside a kernel are not rounded: an error of at most
sqrt(K) units for K terms (Higham, Accuracy and Stability of Numerical Algorithms, chapter 4).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mprun._torch import DispatchMode, no_dispatch, op_name, tree_map
from mprun.numerics.float64 import in_float64
from mprun.numerics.nonfinite.op_call import op_spec

COPIES = ("_to_copy", "to", "clone", "copy_", "alias", "detach", "lift_fresh")
"""Ops that make no new number."""


def float64_copy(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and floating buffers are float64; tied ones stay tied."""
    twin = copy.deepcopy(model)
    wide: dict[nn.Parameter, nn.Parameter] = {}
    for module in twin.modules():
        for name, p in [*module.named_parameters(recurse=False)]:
            if p.is_floating_point():
                setattr(module, name, wide.setdefault(p, _wide(p)))
        for name, x in [*module.named_buffers(recurse=False)]:
            if x.is_floating_point():
                setattr(module, name, x.double())
    return twin


def _wide(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(p.detach().double(), p.requires_grad)


def set_values(twin: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a float64 copy the values of these names, where it has them in the same shape."""
    own: dict[str, Tensor] = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    for name, value in values.items():
        if name in own and own[name].shape == value.shape:
            own[name].data = value.detach().to(own[name].device, own[name].dtype, copy=True)


class Exact(DispatchMode):
    """Casts return float64. Results are rounded to `dtype`, where it is not None.

    Enter it with `exact_arithmetic`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = op_name(func)
        if name == "_to_copy" and is_floating(kwargs.get("dtype")) and args[0].is_floating_point():
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        if self.dtype is None or name in COPIES or not op_spec(func).makes_numbers:
            return result
        with no_dispatch(), torch.no_grad():
            return tree_map(self._rounded, result)

    def _rounded(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype is torch.float64 and self.dtype is not None:
            return x.copy_(x.to(self.dtype))  # in place: an op may return one of its arguments
        return x


@contextmanager
def exact_arithmetic(twin: nn.Module) -> Iterator[Exact]:
    """Inside, a float64 copy computes without casts; set `dtype` of the result to round."""
    exact = Exact()
    with in_float64(twin), torch.autocast("cpu", enabled=False), exact:
        yield exact


def is_floating(dtype: Any) -> bool:
    """Whether it is a floating dtype."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
