"""Every op of a training step, as it runs.

A dispatch mode sees each op below autograd and autocast, casts included. `OpWatcher` is that mode.
It also knows the module and the phase of each op (`StepTracker`). Its subclasses decide what to do
with an op: `OpRecorder` notes dtypes and times, `MemoryRecorder` counts memory, and `nonfinite`
searches for NaN and infinities.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision._torch import (
    DispatchMode,
    op_name,
    schema_of,
    storage_key,
    tree_leaves,
    write_count,
)
from mprun.precision.policy import dtype_name
from mprun.watch.step_events import StepListener, StepTracker

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
    layout: tuple[int, ...]  # Offset and strides in the storage


@dataclass(frozen=True)
class RecordedOp:
    """One op that ran."""

    name: str  # ATen's, without the overload: `addmm`
    phase: str  # One of `step_events.PHASES`
    module: str  # The path of the module, empty outside of the model
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    began_s: float  # By `time.perf_counter`
    time_s: float
    is_view: bool  # Whether it only gives its input another shape, offset or strides
    call: Any  # The result of the recorder's `call`, after the op

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
    module: str  # Path of the module whose forward pass ran; empty for the root or none
    phase: str
    dtypes: tuple[str, ...]  # Distinct floating dtypes of its inputs, in order

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
        # Of the kernel and the dispatcher, not of the Python code around it. On CUDA each op is
        # waited for, so times sum to more than a step that overlaps ops
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


def floating_dtypes(tree: Any) -> tuple[str, ...]:
    """The distinct floating dtypes of the tensors in a structure of arguments, in order."""
    names = (dtype_name(x.dtype) for x in tensors_of(tree) if x.is_floating_point())
    return tuple(dict.fromkeys(names))


@functools.cache
def _is_view(func: Any) -> bool:
    aliases = (r.alias_info for r in schema_of(func).returns)
    return any(a is not None and not a.is_write for a in aliases)
