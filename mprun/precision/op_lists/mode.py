"""Op lists at work: a region in which each call of PyTorch is cast by its rule.

A `TorchFunctionMode` sees every call from Python (functions, methods, operators, modules through
the functions they call) before autograd does, so casts are part of the graph and gradients of
float32 weights are float32. Below autograd it would be too late. In PyTorch's dispatcher, where
torch.autocast works, kernels can be replaced, but Inductor's cache does not notice it.

The backward pass follows the dtypes of the forward one. Python code in it (hooks, custom autograd
functions) is not cast, with two exceptions: activation checkpointing runs forward code again and
must cast it as before, and custom autograd functions can have torch.amp's decorators (`custom.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from mprun._torch import (
    function_modes,
    in_backward,
    in_recomputation,
    recurrent_layers_take_any_dtype,
)
from mprun.precision.op_lists import rules
from mprun.precision.op_lists.custom import custom_functions_cast
from mprun.precision.op_lists.rules import Function
from mprun.precision.op_lists.table import OpenedFunction, OpeningMode, Table


class _State:
    """The innermost region's; not fields of the mode, because compiled code cannot set those."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.off = False
        self.in_custom_backward = False


_found = torch.accelerator.current_accelerator()
ACCELERATOR = "cuda" if _found is None else _found.type
"""The kind of accelerator that this PyTorch is for; CUDA where it is for none."""


class _CastMode(OpeningMode):
    """Hands each call to its handler in the table of the innermost region."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.state = _State(table)
        self.inside: Function | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        state, kwargs = self.state, kwargs or {}
        if state.off:
            return state.table.off(func, args, kwargs)
        handler = state.table.handlers.get(func)
        # Most calls that are not for ops on lists: getters, and those of compiled code.
        if handler is rules.plain or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            if handler is None:
                return func(*args, **kwargs)
        elif in_backward() and not state.in_custom_backward and not in_recomputation():
            return func(*args, **kwargs)
        elif handler is None:
            handler = state.table.added(func)
        if isinstance(handler, OpenedFunction):
            return handler.run(self, func, args, kwargs)
        return handler(func, args, kwargs)


def _current() -> _CastMode | None:
    """The mode the calling thread is in."""
    return next((m for m in reversed(function_modes()) if isinstance(m, _CastMode)), None)


@contextmanager
def region(table: Table) -> Iterator[None]:
    """Inside, calls are cast by `table`; of nested regions the innermost decides."""
    mode = _current()
    if mode is None:
        by_lists = custom_functions_cast(_custom_backward, disable_casts)
        with _CastMode(table), recurrent_layers_take_any_dtype(), by_lists:
            yield
        return
    state = mode.state
    before = state.table, state.off
    state.table, state.off = table, False
    try:
        yield
    finally:
        state.table, state.off = before


def _custom_backward() -> Callable[[], AbstractContextManager[object]] | None:
    """Makes the region for the backward pass of a custom function called now; None: no casts."""
    mode = _current()
    return None if mode is None or mode.state.off else _region_factory(mode.state.table)


@functools.lru_cache(maxsize=256)
def _region_factory(table: Table) -> Callable[[], AbstractContextManager[object]]:
    """The same object for the same table, which custom functions are cached by."""
    return functools.partial(_backward_region, table)


@contextmanager
def _backward_region(table: Table) -> Iterator[None]:
    """A region inside the backward pass of a custom function."""
    with region(table):
        mode = _current()
        assert mode is not None
        before, mode.state.in_custom_backward = mode.state.in_custom_backward, True
        try:
            yield
        finally:
            mode.state.in_custom_backward = before


@contextmanager
def _off(mode: _CastMode) -> Iterator[None]:
    """Nothing is cast by `mode` inside."""
    state = mode.state
    before, state.off = state.off, True
    try:
        yield
    finally:
        state.off = before


@contextmanager
def disable_casts() -> Iterator[None]:
    """A context manager and decorator: inside, nothing is cast, by op lists or by autocast.

    Ops run in the dtype of their inputs, as PyTorch has it without mixed precision; bring the
    inputs to one dtype where an op needs that:

        with disable_casts():
            q, r = torch.linalg.qr(x.float())

        @disable_casts()
        def penalty(weights): ...
    """
    if not anything_casts():  # the common case, at every step of an optimizer
        yield
        return
    mode = _current()
    off = nullcontext() if mode is None else _off(mode)
    with off, _autocast_off("cpu"), _autocast_off(ACCELERATOR):
        yield


def anything_casts() -> bool:
    """Whether the calling thread is in a region of op lists or of autocast."""
    by_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(ACCELERATOR)
    return by_autocast or _current() is not None


def _autocast_off(device_type: str) -> AbstractContextManager[object]:
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()
