"""Callables that stand in for a module's forward."""

from __future__ import annotations

from typing import Any

from torch import nn


class Forward:
    """What `module.forward` becomes: the forward it had, with something around it.

    An object with the module in a field, not a closure: copying or pickling the model copies it
    along, bound to the copied module.

    Args:
        module: the module, whose `forward` the caller replaces by this.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


class Float32Statistics(Forward):
    """The forward of a norm layer with 16-bit parameters and float32 running statistics.

    PyTorch's kernels take 16-bit inputs with statistics and parameters in float32, but not with
    16-bit parameters, so those are widened for the call; the output has the input's dtype.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self._module._parameters
        stored = dict(parameters)
        parameters.update({k: None if p is None else p.float() for k, p in stored.items()})  # type: ignore[misc]
        try:
            return super().__call__(*args, **kwargs)
        finally:
            parameters.update(stored)
