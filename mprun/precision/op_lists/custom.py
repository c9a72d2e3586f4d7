"""Custom autograd functions under op lists: what `torch.amp` does for them under autocast.

A `torch.autograd.Function` computes its gradients by its own Python code. Its forward pass is cast
like any other code, so its backward pass gets tensors of several dtypes: a bfloat16 gradient, a
float32 weight that it has saved. Under autocast the decorators `torch.amp.custom_fwd` and
`custom_bwd` run that code with casts again. They check for autocast, which is off in a region of op
lists. So the same is done here for functions with these decorators: backward runs in the region of
forward; with `cast_inputs` forward runs on inputs of that dtype, and nothing is cast in either.

A function without them fails under autocast too. Its error is raised with the remedy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mprun.nested import map_tensors

RegionFactory = Callable[[], AbstractContextManager[object]]
"""Makes the region a backward pass runs in."""

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

    Args:
        current: makes the region that a backward pass would run in; None: nothing is cast now.
        off: a region without casts.
    """
    before = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        region = None if torch.compiler.is_compiling() else current()
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
