"""Every op of a training step, as it runs.

A dispatch mode sees each op below autograd and autocast, casts included. `OpWatcher` is that mode.
It also knows the module and the phase of each op (`Tracker`). Its subclasses decide what to do with
an op: `OpRecorder` keeps dtypes and times, `MemoryRecorder` counts memory, and `nonfinite` searches
for NaN and infinities.

Times are of the op's kernel and the dispatcher, not of the Python code around it. On CUDA the
device is waited for before and after each op, so times sum to more than a step that overlaps ops.

Where in a training step an op runs: its module and its phase.

An op below autograd knows neither. Hooks keep the path of the module whose forward pass runs. An op
of the backward pass belongs to the module whose forward pass made its autograd node. Autograd
numbers its nodes in the order they are made, and knows which node runs. So the tracker notes the
next number whenever a module begins or ends: so it knows which module made which numbers.
"""

from __future__ import annotations

import functools
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun._torch import (
    DispatchMode,
    backward_node,
    next_node,
    op_name,
    schema_of,
    storage_key,
    tree_leaves,
    write_count,
)

PHASES = ("forward", "backward", "optimizer", "other")


class OpContext(NamedTuple):
    """Where an op runs."""

    phase: str
    """One of `PHASES`: forward is the model's, other is the loss, its scale and clipping."""
    module: str | None
    """The path of the module, empty for the model itself; None outside of it."""


class StepListener:
    """Is notified of the parts of a training step; by default it does nothing."""

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        """A module is called, and not by another one: the model, or a part called by itself.

        Also called where activation checkpointing recomputes a part in the backward pass.

        Args:
            path: of the module, empty for the model.
            inputs: positional and keyword arguments.
        """

    def on_module_end(self, path: str, outputs: Any) -> None:
        """A module, called by another one or not, returned `outputs`; None where it raised."""

    def on_forward_end(self, path: str, outputs: Any) -> None:
        """The call that `on_forward_begin` was notified of returned `outputs`."""

    def on_update_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """`optimizer.step(*args[1:], **kwargs)` begins."""

    def on_update_end(self, optimizer: Optimizer) -> None:
        """It ended."""


class StepTracker:
    """Follows a model and its optimizers through their steps."""

    def __init__(self) -> None:
        self.first_node = 0
        """The number of the first autograd node of the last call of the model, or of a part."""
        self._paths: list[str] = []
        self._optimizing = False
        self._made: dict[int, tuple[list[int], list[str | None]]] = {}
        """Thread to numbers of nodes, and who made those below each and not below the one before.

        Each thread numbers its nodes by itself.
        """

    @contextmanager
    def following(
        self,
        model: nn.Module,
        *optimizers: Optimizer | None,
        listeners: Sequence[StepListener] = (),
    ) -> Iterator[None]:
        """Know the modules of `model` and the steps of `optimizers` while this is entered."""
        with ExitStack() as stack:
            handles: list[Any] = []
            for path, module in model.named_modules():
                begin, end = self._module_hooks(path, listeners)
                handles += (
                    module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
                    module.register_forward_hook(end, always_call=True),
                )
            before, after = self._step_hooks(listeners)
            for optimizer in optimizers:
                if optimizer is not None:
                    handles += (
                        optimizer.register_step_pre_hook(before),
                        optimizer.register_step_post_hook(after),
                    )
            for handle in handles:
                stack.callback(handle.remove)
            try:
                yield
            finally:
                self.forget()

    def begin_update(self) -> None:
        """An optimizer's step begins; for those that `following` does not have."""
        self._optimizing = True

    def end_update(self) -> None:
        """It ended."""
        self._optimizing = False

    def forget_graph(self) -> None:
        """Drop the notes on nodes of a graph that is gone."""
        self._made.clear()

    def forget(self) -> None:
        """Drop everything known of earlier steps."""
        self.forget_graph()
        self._paths.clear()
        self._optimizing = False

    def context(self) -> OpContext:
        """Where the next op runs."""
        if self._paths:  # forward code, also where the backward pass runs it again
            return OpContext("forward", self._paths[-1])
        node = backward_node()
        if node is not None:
            return OpContext("backward", self.module_of(node))
        return OpContext("optimizer" if self._optimizing else "other", None)

    def module_of(self, node: int, own_thread: bool = False) -> str | None:
        """The module that made an autograd node; None outside of the model.

        Args:
            node: its number.
            own_thread: whether the calling thread made it. Else the nodes of all threads are
                searched, those of the first one to call the model first.
        """
        threads = [threading.get_ident()] if own_thread else list(self._made)
        for thread in threads:
            limits, modules = self._made.get(thread, ([], []))
            i = bisect_right(limits, node)
            if i < len(limits) and modules[i] is not None:
                return modules[i]
        return None

    def _note_nodes(self, module: str | None) -> None:
        """The nodes made since the last note belong to `module`."""
        limits, modules = self._made.setdefault(threading.get_ident(), ([], []))
        limits.append(next_node())
        modules.append(module)

    def _module_hooks(
        self, path: str, listeners: Sequence[StepListener]
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            caller = self._paths[-1] if self._paths else None
            self._paths.append(path)  # before a listener can raise: `end` is always called
            if caller is None:
                self.first_node = next_node()
                for listener in listeners:
                    listener.on_forward_begin(path, (args, kwargs))
            self._note_nodes(caller)

        def end(module: nn.Module, args: Any, outputs: Any) -> None:
            self._note_nodes(self._paths.pop())
            for listener in listeners:
                listener.on_module_end(path, outputs)
                if not self._paths:
                    listener.on_forward_end(path, outputs)

        return begin, end

    def _step_hooks(
        self, listeners: Sequence[StepListener]
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.begin_update()
            for listener in listeners:
                listener.on_update_begin(optimizer, args, kwargs)

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.end_update()
            for listener in listeners:
                listener.on_update_end(optimizer)

        return begin, end


RunOp = Callable[[], Any]


class OpWatcher(DispatchMode):
    """Hands each op to `on_op` while it is entered; it may be entered twice."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = StepTracker()
        self._muted = False

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        """Handle an op: call `run` once and return its result.

        Args:
            func: the `OpOverload`.
            args, kwargs: its arguments.
            run: computes it.
        """
        raise NotImplementedError

    @contextmanager
    def following(
        self,
        model: nn.Module,
        *optimizers: Optimizer | None,
        listeners: Sequence[StepListener] = (),
    ) -> Iterator[None]:
        """Know the modules of `model` and the steps of `optimizers` while this is entered."""
        try:
            with self.tracker.following(model, *optimizers, listeners=listeners):
                yield
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop the data of steps that are done."""

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Inside, ops run without `on_op`."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)

        def run() -> Any:
            self._muted = True  # ops that a mode below runs in its place are not the model's
            try:
                return func(*args, **kwargs)
            finally:
                self._muted = False

        return self.on_op(func, args, kwargs, run)


class TensorRecord(NamedTuple):
    """A tensor that an op read or made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    memory: tuple[int, int]
    """Storage and number of writes: of two live tensors with the same numbers in it, equal."""
    layout: tuple[int, ...]
    """Offset and strides in the storage."""


@dataclass(frozen=True)
class RecordedOp:
    """One op that ran."""

    name: str
    """ATen's, without the overload: `addmm`."""
    phase: str
    """One of `tracker.PHASES`."""
    module: str
    """The path of the module, empty outside of the model."""
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    began_s: float
    """By `time.perf_counter`."""
    time_s: float
    is_view: bool
    """Whether it only gives its input another shape, offset or strides."""
    call: Any
    """The result of the recorder's `call`, after the op."""

    @property
    def is_cast(self) -> bool:
        """Whether it copies a tensor into another dtype."""
        copies = self.name == "_to_copy" and len(self.inputs) == 1
        return copies and self.inputs[0].dtype != self.outputs[0].dtype


FIX = (
    "make the tensor in the model's dtype (for example torch.zeros(..., dtype=x.dtype)), or take a "
    "mode that casts (precision=bf16_mixed, precision=fp16_mixed)"
)


class OpFault(NamedTuple):
    """An op that raised an error."""

    op: str
    module: str
    """Path of the module whose forward pass ran; empty for the root or none."""
    phase: str
    dtypes: tuple[str, ...]
    """Distinct floating dtypes of its inputs, in order."""

    def __str__(self) -> str:
        of = f" of module {self.module}" if self.module else ""
        inputs = f" with inputs in {' and '.join(self.dtypes)}" if self.dtypes else ""
        fix = f"; {FIX}" if len(self.dtypes) > 1 else ""
        return f"{self.op} in the {self.phase} pass{of}{inputs}{fix}"


class OpRecorder(OpWatcher):
    """Records each op while it is entered.

    Args:
        on_record: is called after each op.
        call: returns the value of an op's `call`, for example the Python call it belongs to.
        synchronize: waits for the device; not needed on the CPU.
    """

    def __init__(
        self,
        on_record: Callable[[RecordedOp], None],
        call: Callable[[], Any] = lambda: None,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._on_record = on_record
        self._call = call
        self._synchronize = synchronize
        self._cast_storages: list[Any] = []
        self.fault: OpFault | None = None
        """The last op that raised an error, where one did."""

    def forget(self) -> None:
        self._cast_storages.clear()

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        name, context = op_name(func), self.tracker.context()
        phase, module = context.phase, context.module or ""
        inputs = tuple(_records((args, kwargs)))
        self._synchronize()
        began = time.perf_counter()
        try:
            result = run()
        except Exception:
            self.fault = OpFault(name, module, phase, floating_dtypes((args, kwargs)))
            raise
        self._synchronize()
        time_s = time.perf_counter() - began
        outputs = tuple(_records(result))
        if not inputs and not outputs:  # a profiler's mark
            return result
        op = RecordedOp(
            name, phase, module, inputs, outputs, began, time_s, _is_view(func), self._call()
        )
        if op.is_cast:  # freed memory would be given out again, and two casts taken for one
            self._cast_storages += [x.untyped_storage() for x in (args[0], result)]
        self._on_record(op)
        return result


def _records(tree: Any) -> Iterator[TensorRecord]:
    for x in tensors_of(tree):
        memory = storage_key(x), write_count(x)
        layout = (x.storage_offset(), *x.stride()) if x.layout == torch.strided else ()
        nbytes = x.numel() * x.element_size()
        yield TensorRecord(x.dtype, tuple(x.shape), nbytes, memory, tuple(map(int, layout)))


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The tensors in a structure of arguments or results, in order."""
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor))


def dtype_name(dtype: torch.dtype) -> str:
    """PyTorch's name without the package."""
    return str(dtype).removeprefix("torch.")


def floating_dtypes(tree: Any) -> tuple[str, ...]:
    """The distinct floating dtypes of the tensors in a structure of arguments, in order."""
    names = (dtype_name(x.dtype) for x in tensors_of(tree) if x.is_floating_point())
    return tuple(dict.fromkeys(names))


@functools.cache
def _is_view(func: Any) -> bool:
    aliases = (r.alias_info for r in schema_of(func).returns)
    return any(a is not None and not a.is_write for a in aliases)
