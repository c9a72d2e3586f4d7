"""Op lists at work: a region in which each call of PyTorch is cast by its rule.

A `TorchFunctionMode` sees every call from Python (functions, methods, operators, modules through
the functions they call) before autograd does, so casts are part of the graph and gradients of
float32 weights are float32. Below autograd it would be too late; in PyTorch's dispatcher, where
torch.autocast sits, kernels can be replaced, but Inductor's cache does not notice.

PyTorch switches a mode off while it handles a call. A function written in Python that is on no list
(`F.multi_head_attention_forward`) would hide the ops inside it: its body is run with the mode on.

The backward pass follows the dtypes of the forward one; Python code in it (hooks, custom autograd
functions) is not cast. Two things are: activation checkpointing runs forward code again there, and
must cast it as before; custom autograd functions with torch.amp's decorators (`custom.py`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, get_overridable_functions

from mprun._torch import (
    function_modes,
    in_backward,
    in_recomputation,
    recurrent_layers_take_any_dtype,
)
from mprun.precision.op_lists import rules
from mprun.precision.op_lists.bodies import OPERATORS, calls_of
from mprun.precision.op_lists.casts import Casts
from mprun.precision.op_lists.custom import Region, functions_cast
from mprun.precision.op_lists.lists import OpLists
from mprun.precision.op_lists.names import INNER, name_of, spelled
from mprun.precision.op_lists.rules import Function, Handler
from mprun.records.op_list_files import KINDS

COMPILED = torch._ops.OpOverload
"""How compiled code calls ops (or `torch.convolution`): their casts were decided in tracing."""


class Watcher(Protocol):
    """Is told which op runs by which rule, and which casts that takes."""

    def op(self, name: str, rule: str) -> AbstractContextManager[object]:
        """The op `name`, decided by `rule`, runs while this is entered."""

    def cast(self, have: torch.dtype, want: torch.dtype) -> None:
        """An input of the op that runs goes from `have` to `want`."""


class Table:
    """A handler for each function, made from lists and a dtype.

    Args:
        lists: which op is on which list.
        dtype: what ops of the lower list compute in: bfloat16 or float16.
        casts: does the casts.
        device_type: cpu or cuda, whose kernels will run.
        watcher: is told; None for nobody.
    """

    def __init__(
        self,
        lists: OpLists,
        dtype: torch.dtype,
        casts: Casts,
        device_type: str,
        watcher: Watcher | None = None,
    ) -> None:
        self.lists = lists
        self.dtype = dtype
        self.custom_backward = functools.partial(_again, self)
        self._watcher = watcher
        self._same_dtype = rules.SAME_DTYPE_ON_CUDA if device_type == "cuda" else frozenset()
        cast = casts.to if watcher is None else _told(casts, watcher)
        self._mutated = rules.mutated(cast)
        self._activation = {
            "lower": rules.activation_to(cast, dtype),
            "fp32": rules.activation_to(cast, torch.float32),
        }
        self._by_rule = {
            "lower": rules.to_dtype(cast, dtype),
            "fp32": rules.to_dtype(cast, torch.float32),
            "promote": rules.promote(cast),
            "first input": rules.first_input(cast),
            "as it is": rules.plain,
        }
        self.handlers: dict[Function, Handler | _Inside] = {f: self.make(f) for f in _functions()}

    def rule(self, name: str) -> str:
        """The rule of an op: its list, or what holds for ops on none."""
        for candidate in (name, *INNER.get(name, ())):
            if (kind := self.lists.rules.get(candidate)) is not None:
                return kind
        return "first input" if self.lists.first_input else "as it is"

    def make(self, function: Function) -> Handler | _Inside:
        """The handler of a function."""
        if isinstance(function, COMPILED) or function is torch.convolution:
            return rules.plain
        name = name_of(function)
        if (said := getattr(function, "cast_rule", None)) is not None or name in rules.EXPLICIT:
            return self._watched(name or function.__name__, said or "explicit", rules.plain)
        if name in ("backward", "grad") and isinstance(function, types.FunctionType):
            return _inside(function, rules.plain)  # so that recomputation is seen
        if name is None or name in rules.UNCAST or name.startswith(("_foreach_", "is_", "sym_")):
            return rules.plain
        if name.endswith("_") and not name.startswith("_"):
            return self._watched(name, "in-place", self._mutated)
        rule = self.rule(name)
        in_python = isinstance(function, types.FunctionType)
        handler = self._norm(name, rule) if name in rules.NORMS else self._by_rule[rule]
        if name == "linalg_matrix_power" and name not in self.lists.rules:
            handler = self._power(handler)
        if in_python:
            handler = rules.unless_mutating(handler, self._mutated)
        handler = self._watched(name, rule, handler)
        if in_python and rule not in KINDS and self._hides_listed(function, name):
            return _inside(function, handler)
        return handler

    def _hides_listed(self, function: Any, name: str) -> bool:
        """Whether the body of a Python function may call an op of a list other than itself."""
        called = calls_of(function)
        if OPERATORS in called:
            return True
        inner = {canonical for word in called for canonical in spelled(word)}
        return any(self.rule(op) in KINDS for op in inner - {name, f"{name}_"})

    def off(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function where casts are disabled."""
        if self._watcher is None:
            return function(*args, **kwargs)
        with self._watcher.op(name_of(function) or "", "disabled"):
            return function(*args, **kwargs)

    def _norm(self, name: str, rule: str) -> Handler:
        """The activation alone is cast, but where that cannot be or float32 is wanted of all."""
        whole = rule == "fp32" or name in self._same_dtype
        if whole and name not in rules.WRITES_STATISTICS:
            return self._by_rule[rule]
        return self._activation.get(rule, rules.plain)

    def _power(self, products: Handler) -> Handler:
        """A matrix power by what it consists of: an inverse where n < 0, then products."""
        inverse = self._by_rule[self.rule("linalg_inv")]

        def handler(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            kwargs = dict(kwargs)
            x, n = args[0] if args else kwargs.pop("input", None), [*args, None][1]
            n = kwargs.pop("n", n)
            if x is None or n is None:
                return function(*args, **kwargs)
            if n < 0:
                x, n = inverse(torch.linalg.inv, (x,), {}), -n
            if n < 2:  # no product
                return function(x, n, **kwargs)
            return products(function, (x, n), kwargs)

        return handler

    def _watched(self, name: str, rule: str, handler: Handler) -> Handler:
        watcher = self._watcher
        if watcher is None:
            return handler

        def telling(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            with watcher.op(name, rule):
                return handler(function, args, kwargs)

        return telling


def _told(casts: Casts, watcher: Watcher) -> Callable[..., Any]:
    """`casts.to` that tells the watcher of what is really cast."""

    def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result = casts.to(x, dtype)
        if result is not x:
            watcher.cast(x.dtype, dtype)
        return result

    return cast


@functools.cache
def _functions() -> tuple[Function, ...]:
    """Every function a mode can see, so that a table is whole before anything is traced."""
    found = (f for functions in get_overridable_functions().values() for f in functions)
    return tuple(dict.fromkeys(f for f in found if callable(f)))


class _Inside:
    """A handler that runs the body of a Python function with the mode on.

    Args:
        body: a copy of the function that does not hand itself to modes.
        whole: the handler where the body hands the function itself on again: its inside cannot be
            seen.
    """

    def __init__(self, body: Function, whole: Handler) -> None:
        self._body = body
        self._whole = whole

    def run(
        self, mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call `function`, handed on by `mode`."""
        if mode.inside is function:
            return self._whole(function, args, kwargs)
        before, mode.inside = mode.inside, function
        try:
            with mode:
                return self._body(*args, **kwargs)
        finally:
            mode.inside = before


def _inside(function: Any, whole: Handler) -> _Inside:
    """Runs the body of a Python function with the mode on.

    Such a function begins by asking whether a mode is there and handing itself to it; its copy is
    told there is none.

    Args:
        function: the function.
        whole: the handler for a body that hands the function itself on again, whose inside cannot
            be seen.
    """
    answers = {name: _no for name in function.__globals__ if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **answers},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__

    return _Inside(copy, whole)


def _no(*_: object) -> bool:
    return False


class _State:
    """What holds in the innermost region; apart from the mode, as compiled code can set it here."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.off = False
        self.in_custom_backward = False


class _Mode(TorchFunctionMode):
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
            handler = state.table.handlers[func] = state.table.make(func)
        if isinstance(handler, _Inside):
            return handler.run(self, func, args, kwargs)
        return handler(func, args, kwargs)


def _current() -> _Mode | None:
    """The mode the calling thread is in."""
    return next((m for m in reversed(function_modes()) if isinstance(m, _Mode)), None)


@contextmanager
def region(table: Table) -> Iterator[None]:
    """Calls are cast by `table` inside; of regions in one another the innermost holds."""
    mode = _current()
    if mode is None:
        by_lists = functions_cast(_custom_backward, disable_casts)
        with _Mode(table), recurrent_layers_take_any_dtype(), by_lists:
            yield
        return
    state = mode.state
    before = state.table, state.off
    state.table, state.off = table, False
    try:
        yield
    finally:
        state.table, state.off = before


def _custom_backward() -> Region | None:
    """Makes the region for the backward pass of a custom function called now; None: no casts."""
    mode = _current()
    return None if mode is None or mode.state.off else mode.state.table.custom_backward


@contextmanager
def _again(table: Table) -> Iterator[None]:
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
def _off(mode: _Mode) -> Iterator[None]:
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
    mode = _current()
    with (
        _off(mode) if mode is not None else nullcontext(),
        _autocast_off("cpu") if torch.is_autocast_enabled("cpu") else nullcontext(),
        _autocast_off("cuda") if torch.is_autocast_enabled("cuda") else nullcontext(),
    ):
        yield


def _autocast_off(device_type: str) -> torch.autocast:
    return torch.autocast(device_type, enabled=False)
