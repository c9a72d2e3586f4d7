"""Which handler casts for which function: op lists and a dtype as a table.

A `Table` has a handler of `rules.py` for every PyTorch function that Python can call. In a region a
`TorchFunctionMode` sees every call from Python before autograd does, so casts are part of the graph
and gradients of float32 weights are float32. (In PyTorch's dispatcher, where torch.autocast works,
Inductor's cache would not notice kernels that are replaced.)

PyTorch switches a mode off while it handles a call. So a function written in Python that hides
listed ops (`F.multi_head_attention_forward`) is *opened*: its body runs with the mode on. That
costs microseconds a call, so a function is opened only if its code names a listed op.

The backward pass follows the dtypes of the forward one; Python code in it is not cast, but for
recomputation by activation checkpointing and custom functions with torch.amp's decorators.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, get_overridable_functions

from mprun.precision._torch import (
    OpOverload,
    OpOverloadPacket,
    calling_frames,
    function_modes,
    in_backward,
    in_recomputation,
    recurrent_layers_take_any_dtype,
)
from mprun.precision.op_lists import rules
from mprun.precision.op_lists.lists import INNER, OpLists, custom_functions_cast, name_of, spelled
from mprun.precision.op_lists.rules import Casts, Function, Handler
from mprun.precision.policy import dtype_name
from mprun.records.op_list_files import KINDS


class Watcher(Protocol):
    """Is called for each op with its rule, and for each cast."""

    def op(self, name: str, rule: str) -> AbstractContextManager[object]:
        """The op `name`, decided by `rule`, runs while this is entered."""

    def cast(self, have: torch.dtype, want: torch.dtype) -> None:
        """An input of the op that runs goes from `have` to `want`."""


class CastLog:
    """A watcher that reports each distinct cast once, with its module, in a line.

    `cast: linear (lower) in encoder.fc1 (Linear): float32 to bfloat16`
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported: set[str] = set()
        self._running: list[str] = []
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    @contextmanager
    def op(self, name: str, rule: str) -> Iterator[None]:
        self._running.append(f"{name} ({rule})")
        try:
            yield
        finally:
            self._running.pop()

    def cast(self, have: torch.dtype, want: torch.dtype) -> None:
        names = f"{dtype_name(have)} to {dtype_name(want)}"
        line = f"cast: {self._running[-1]}{self._module()}: {names}"
        if line not in self._reported:
            self._reported.add(line)
            self._report(line)

    def _module(self) -> str:
        """` in NAME (CLASS)` of the innermost module that runs, empty outside of all."""
        call = nn.Module.__call__.__code__
        modules = [f.f_locals["self"] for f in calling_frames() if f.f_code is call]
        if not modules:
            return ""
        outermost, innermost = modules[-1], modules[0]
        for name, module in outermost.named_modules():
            self._names.setdefault(module, name)  # a part that is called by itself keeps its name
        name, kind = self._names.get(innermost, ""), type(innermost).__name__
        return f" in {name} ({kind})" if name else f" in {kind}"


class Table:
    """A handler for each function, made from lists and a dtype; `casts` does the casts."""

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
        self._watcher = watcher
        self._same_dtype = rules.SAME_DTYPE_ON_CUDA if device_type == "cuda" else frozenset()
        cast = casts.to if watcher is None else _reporting(casts, watcher)
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
        # Made before anything is traced: torch.compile's guards fail where a table grows
        self.handlers: dict[Function, Handler | OpenedFunction] = {
            f: self.make(f) for f in _functions()
        }
        self._late: dict[Function, Handler | OpenedFunction] = {}

    def rule(self, name: str) -> str:
        """The rule of an op: its list, or the rule of unlisted ops."""
        for candidate in (name, *INNER.get(name, ())):
            if (kind := self.lists.rules.get(candidate)) is not None:
                return kind
        return "first input" if self.lists.first_input else "as it is"

    def late(self, function: Function) -> Handler | OpenedFunction:
        """The handler of a function that was not known, stored for its next call.

        Not stored in `handlers`: torch.compile calls unknown functions while it traces, and its
        guard on what it has read fails where that changes.
        """
        if function not in self._late:
            self._late[function] = self.make(function)
        return self._late[function]

    def make(self, function: Function) -> Handler | OpenedFunction:
        """The handler of a function."""
        # Compiled code calls ops like this: their casts were decided in tracing.
        if isinstance(function, OpOverload) or function is torch.convolution:
            return rules.plain
        name = name_of(function)
        # A cast of mprun's own, such as that of a layer
        own_rule = getattr(function, "cast_rule", None)
        if own_rule is not None or name in rules.EXPLICIT:
            return self._watched(name or function.__name__, own_rule or "explicit", rules.plain)
        if name in ("backward", "grad") and isinstance(function, FunctionType):
            return OpenedFunction(function, rules.plain)  # so that recomputation is seen
        if name is None or name in rules.UNCAST or name.startswith(("_foreach_", "is_", "sym_")):
            return rules.plain
        if name == "setitem":
            return self._watched(name, "in-place", rules.indexed(self._mutated))
        if name.endswith("_") and not name.startswith("_"):
            return self._watched(name, "in-place", self._mutated)
        return self._by_list(function, name)

    def _by_list(self, function: Function, name: str) -> Handler | OpenedFunction:
        """The handler of a function that no rule of its own decides."""
        if _is_of_torchvision(function):  # its kernels know float32; autocast casts them so too
            return self._watched(name, "fp32", self._by_rule["fp32"])
        rule = self.rule(name)
        in_python = isinstance(function, FunctionType)
        handler = self._norm(name, rule) if name in rules.NORMS else self._by_rule[rule]
        if name == "linalg_matrix_power" and name not in self.lists.rules:
            handler = self._power(handler)
        if in_python:
            handler = rules.unless_mutating(handler, self._mutated)
        handler = self._watched(name, rule, handler)
        if in_python and rule not in KINDS and self._hides_listed(function, name):
            return OpenedFunction(function, handler)
        return handler

    def _hides_listed(self, function: Any, name: str) -> bool:
        """Whether the body of a Python function may call an op of a list other than itself."""
        called = calls_of(function)
        if OPERATORS in called:
            return True
        inner = {canonical for called_name in called for canonical in spelled(called_name)}
        return any(self.rule(op) in KINDS for op in inner - {name, f"{name}_"})

    def off(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function where casts are disabled."""
        if self._watcher is None:
            return function(*args, **kwargs)
        with self._watcher.op(name_of(function) or "", "disabled"):
            return function(*args, **kwargs)

    def _norm(self, name: str, rule: str) -> Handler:
        """Casts the activation alone, or all inputs for float32 and for kernels that need it."""
        whole = rule == "fp32" or name in self._same_dtype
        if whole and name not in rules.WRITES_STATISTICS:
            return self._by_rule[rule]
        return self._activation.get(rule, rules.plain)

    def _power(self, products: Handler) -> Handler:
        """Casts a matrix power as its parts: an inverse if n < 0, then products."""
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

        def watched(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            with watcher.op(name, rule):
                return handler(function, args, kwargs)

        return watched


def _reporting(casts: Casts, watcher: Watcher) -> Callable[..., Any]:
    """`casts.to` that reports what is really cast to the watcher."""

    def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result = casts.to(x, dtype)
        if result is not x:
            watcher.cast(x.dtype, dtype)
        return result

    return cast


def _is_of_torchvision(function: Function) -> bool:
    if not isinstance(function, OpOverloadPacket):
        return False
    first: OpOverload = getattr(function, function.overloads()[0])
    return bool(first.namespace == "torchvision")


@functools.cache
def _functions() -> tuple[Function, ...]:
    """Every function a mode can see, so that a table is whole before anything is traced."""
    groups = get_overridable_functions().values()
    every = dict.fromkeys(f for functions in groups for f in functions if callable(f))
    # without accessors of a property: PyTorch 2.14 cannot compile a table that has one
    return tuple(f for f in every if not isinstance(getattr(f, "__self__", None), property))


class OpenedFunction:
    """A handler that runs the body of a Python function with the mode on.

    Such a function first asks whether a mode is active, and hands itself to it. In the copy that
    runs here the answer is always no. `whole` handles it where the body hands the function itself
    on.
    """

    def __init__(self, function: Any, whole: Handler) -> None:
        names = function.__globals__
        asked = [name for name in names if name.startswith("has_torch_function")]
        answers = dict.fromkeys(asked, lambda *_: False)
        self._body = FunctionType(
            function.__code__,
            {**names, **answers},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self._body.__kwdefaults__ = function.__kwdefaults__
        self._whole = whole

    def run(self, mode: _CastMode, function: Function, args: Any, kwargs: Any) -> Any:
        """Call `function`, handed on by `mode`."""
        if mode.inside is function:
            return self._whole(function, args, kwargs)
        before, mode.inside = mode.inside, function
        try:
            with mode:
                return self._body(*args, **kwargs)
        finally:
            mode.inside = before


OPERATORS = "<operators>"  # The entry for `+`, `/`, `@` and the like, on tensors or not


@functools.cache
def calls_of(function: Any) -> frozenset[str]:
    """The names in the code of a function and of PyTorch's functions that it uses."""
    names: set[str] = set()
    functions: list[FunctionType] = [function]
    seen: set[CodeType] = set()
    while functions:
        function = functions.pop()
        code = function.__code__
        if code in seen:
            continue
        seen.add(code)
        names.update(code.co_names)
        if any(map(_computes, dis.get_instructions(code))):
            names.add(OPERATORS)
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        for inner in (*cells, *(function.__globals__.get(name) for name in code.co_names)):
            ours = isinstance(inner, FunctionType) and inner.__module__.startswith("torch")
            if ours and inner.__name__ not in _HELPERS:
                functions.append(inner)
    return frozenset(names)


def _computes(instruction: dis.Instruction) -> bool:
    """Whether it is an operator other than indexing."""
    # BINARY_ADD up to Python 3.10, BINARY_OP from 3.11 on; x[i] is one of those from 3.14 on
    operator = instruction.opname.startswith(("BINARY_", "INPLACE_"))
    indexing = instruction.opname.endswith(("SUBSCR", "SLICE")) or instruction.argrepr == "[]"
    return operator and not indexing


# They check arguments and call no op
_HELPERS = frozenset(
    (
        *("handle_torch_function", "has_torch_function"),
        *("_get_softmax_dim", "_verify_batch_size", "_verify_spatial_size"),
    )
)


class _State:
    """The innermost region's; not fields of the mode, because compiled code cannot set those."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.off = False
        self.in_custom_backward = False


_found = torch.accelerator.current_accelerator()
# The kind of accelerator that this PyTorch is for; CUDA where it is for none
ACCELERATOR = "cuda" if _found is None else _found.type


class _CastMode(TorchFunctionMode):
    """Hands each call to its handler in the table of the innermost region."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.state = _State(table)
        self.inside: Function | None = None
        """The Python function whose body runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
            handler = state.table.late(func)
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
    # Where casts are off a backward pass has none either
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
    mode = _current()
    by_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(ACCELERATOR)
    if mode is None and not by_autocast:  # the common case, at every step of an optimizer
        yield
        return
    off = nullcontext() if mode is None else _off(mode)
    with off, _autocast_off("cpu"), _autocast_off(ACCELERATOR):
        yield


def _autocast_off(device_type: str) -> AbstractContextManager[object]:
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()
