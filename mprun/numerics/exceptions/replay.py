"""An op once more, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mprun._torch import no_dispatch
from mprun.numerics.exceptions.ops import Call, spec_of
from mprun.numerics.exceptions.tensors import tensors_in

LARGEST = 2**26
"""Elements of an op's inputs up to which it is run again: half a GiB in float64."""


def in_float64(
    call: Call, value: Callable[[Tensor], Tensor | None] = lambda x: None
) -> list[Tensor] | None:
    """The results of an op computed in float64, in the order of `call.outputs()`.

    None where that cannot be done: the op draws random numbers, is very large, has no kernel for
    float64, or wrote over inputs of which no copy was kept.

    Args:
        call: the op, which has run.
        value: the float64 numbers a tensor is to have in place of its own, or None.
    """
    spec = spec_of(call.func)
    if spec.random:
        return None
    leaves = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor)]
    if sum(x.numel() for x in leaves) > LARGEST:
        return None
    targets = {id(x) for _, v in call.written() for x in tensors_in(v)}
    if spec.reads_written and not targets <= call.saved.keys():
        return None
    wide: dict[int, Tensor] = {}

    def widened(x: Any) -> Any:
        if isinstance(x, Tensor):
            if id(x) not in wide:
                wide[id(x)] = _widened(x, call.saved.get(id(x)), id(x) in targets, value(x))
            return wide[id(x)]
        return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

    with no_dispatch(), torch.no_grad():
        try:
            args, kwargs = tree_map(widened, (_same_dtypes(call), dict(call.kwargs)))
            result = call.func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, MemoryError):  # no kernel, or no room for it
            return None
    again = Call(call.func, tuple(args), kwargs, result, {}, {})
    return [x for _, _, x in again.outputs()]


def _widened(x: Tensor, saved: Tensor | None, target: bool, value: Tensor | None) -> Tensor:
    """A tensor in float64, if it is floating; in memory of its own, if it is written to."""
    source = value if value is not None else x if saved is None else saved
    wide = source.double() if x.is_floating_point() else source
    return wide.clone() if target else wide


def _same_dtypes(call: Call) -> tuple[Any, ...]:
    """The arguments without the softmax's order to make float32 of float16."""
    names = [a.name for a in call.func._schema.arguments]
    return tuple(
        False if name == "half_to_float" else x for name, x in zip(names, call.args, strict=False)
    )
