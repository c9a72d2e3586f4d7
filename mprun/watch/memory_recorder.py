"""Memory of a training step, counted from the tensors alive: by category, by module, over time.

A process's resident memory shows little of a model: allocators retain freed memory. The storages of
live tensors give exact figures, the same on every run. A storage has one category for its whole
life, so the categories sum to the live bytes at every op:

    parameters, buffers     the model's; they belong to their module
    gradients               what ends up in a parameter's `grad`; to the parameter's module
    optimizer_state         the optimizer's, once it exists; likewise
    activations             made in the forward pass, or its batch; to the module that ran
    temporary               made in the backward pass or after it, and none of the above; to the
                            module whose gradient was being computed

A step on fake tensors (`fake_tensors`) has no data, and works for a model larger than the machine.
Not counted: memory inside kernels and their workspaces, sparse tensors, what an allocator adds by
rounding up.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision import _torch
from mprun.precision.policy import dtype_name
from mprun.records.run_record import (
    MEMORY_CATEGORIES,
    MemoryPeak,
    MemoryTimeline,
    ModuleMemory,
    StorageMemory,
)
from mprun.watch._torch_fakes import FakeTensorMode, conversions_replace_parameters
from mprun.watch.op_watcher import OpFault, OpWatcher, RunOp, floating_dtypes, tensors_of
from mprun.watch.step_events import StepListener

# Owners that are no modules; `(loss)` is everything outside of model and optimizer
INPUTS, LOSS, OPTIMIZER = "(inputs)", "(loss)", "(optimizer)"

# ATen ops whose kernels need all floating inputs in one dtype; fake tensors do not check it
SAME_DTYPE = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr", "convolution")
)

REDUCED_IN_PLACE = frozenset(
    ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
"""Losses whose kernels reduce into the tensor of the single losses: their scalar keeps its memory.

The result of a fake tensor has the memory of a scalar.
"""

WORKSPACES = {"mkldnn_rnn_layer": 3}
"""Ops to the number of the result in which the kernel keeps numbers for its backward pass.

Its size is the library's secret, which fake tensors do not know: a predicted count is without it.
"""

# Namespaces of calls that are no ops: questions for a fake tensor's device, profiler marks
NO_OPS = ("prim", "profiler")


@dataclass(slots=True)
class LiveStorage:
    """A storage: memory that one tensor or several share."""

    nbytes: int
    category: str  # One of `MEMORY_CATEGORIES`
    owner: str  # Path of the module it belongs to, or one of `(inputs)`, `(loss)`, `(optimizer)`
    born: int  # The first point at which it is alive
    shape: tuple[int, ...]  # The shape of the first tensor on it
    dtype: torch.dtype
    died: int | None = None
    """The first point at which it is no longer alive; None where it outlives the step."""


class MemoryPoint(NamedTuple):
    """An op of the step: memory is counted right after it."""

    op: str  # ATen's name
    phase: str  # forward, backward, optimizer, or other (loss, loss scale, clipping)
    owner: str  # As in `LiveStorage`


@dataclass(frozen=True)
class StepMemory:
    """The memory of one training step, as `mprun.numerics.memory(...)` gives it."""

    points: tuple[MemoryPoint, ...]
    """Its ops, in the order they ran."""
    timeline: Mapping[str, tuple[int, ...]]
    """Category to the bytes alive after each op."""
    peak_at: int
    """The first op after which the most is alive."""
    peak_holds: tuple[LiveStorage, ...]
    """All storages alive then, the largest first."""
    kinds: Mapping[str, str]
    """Owner to its class, in the model's order; empty for owners that are no module."""
    why_real: str | None = None
    """Why the step ran on real tensors; None for fake ones."""

    @classmethod
    def of(
        cls,
        storages: Sequence[LiveStorage],
        points: Sequence[MemoryPoint],
        kinds: Mapping[str, str],
    ) -> StepMemory:
        """The sums over `storages`, at each of `points`; `kinds` as the field.

        Raises:
            ValueError: no points.
        """
        if not points:
            raise ValueError("no op ran: there is no step to count")
        timeline = {
            category: _alive_after(len(points), (h for h in storages if h.category == category))
            for category in MEMORY_CATEGORIES
        }
        totals = [sum(row) for row in zip(*timeline.values(), strict=True)]
        at = totals.index(max(totals))
        alive = [h for h in storages if h.born <= at and (h.died is None or at < h.died)]
        alive.sort(key=lambda h: -h.nbytes)
        return cls(tuple(points), timeline, at, tuple(alive), kinds)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return sum(self.categories.values())

    @property
    def categories(self) -> dict[str, int]:
        """Bytes at the peak by category; they sum to it."""
        return {category: row[self.peak_at] for category, row in self.timeline.items()}

    @property
    def totals(self) -> dict[str, int]:
        """`peak` and the categories, as a record's `memory_bytes` has them."""
        return {"peak": self.peak_bytes, **self.categories}

    @cached_property
    def modules(self) -> dict[str, dict[str, int]]:
        """Owner to its bytes at the peak by category, in the model's order; none without any."""
        rows = {owner: dict.fromkeys(MEMORY_CATEGORIES, 0) for owner in self.kinds}
        for h in self.peak_holds:
            rows[h.owner][h.category] += h.nbytes
        return {owner: row for owner, row in rows.items() if any(row.values())}

    @property
    def phase_peaks(self) -> dict[str, int]:
        """Phase to the most bytes alive after one of its ops."""
        peaks: dict[str, int] = {}
        for point, row in zip(self.points, zip(*self.timeline.values(), strict=True), strict=True):
            peaks[point.phase] = max(peaks.get(point.phase, 0), sum(row))
        return peaks

    @property
    def peak(self) -> MemoryPeak:
        """The op after which the most is alive."""
        op, phase, owner = self.points[self.peak_at]
        return MemoryPeak(self.peak_at, op, phase, owner)

    def module_rows(self) -> list[ModuleMemory]:
        """The memory of each owner at the peak."""
        return [
            ModuleMemory(owner, self.kinds[owner], sum(row.values()), **row)
            for owner, row in self.modules.items()
        ]

    def largest(self, count: int = 10) -> list[StorageMemory]:
        """The `count` largest storages at the peak."""
        return [
            StorageMemory(h.nbytes, h.category, h.owner, list(h.shape), dtype_name(h.dtype))
            for h in self.peak_holds[:count]
        ]

    def timeline_rows(self) -> MemoryTimeline:
        """The timeline as recorded."""
        op, phase, module = map(list, zip(*self.points, strict=True))
        rows = {category: list(row) for category, row in self.timeline.items()}
        return MemoryTimeline(op, phase, module, **rows)


def _alive_after(points: int, storages: Iterable[LiveStorage]) -> tuple[int, ...]:
    """Bytes alive after each of `points` ops."""
    changes = [0] * (points + 1)
    for h in storages:
        changes[min(h.born, points)] += h.nbytes
        if h.died is not None:
            changes[min(h.died, points)] -= h.nbytes
    return tuple(accumulate(changes[:points]))


class DtypeMismatchError(RuntimeError):
    """Real kernels would refuse this step; the text is that of the `OpFault`."""


def memory(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: Optimizer,
    inputs: Iterable[Tensor] = (),
    warmup: int = 1,
) -> StepMemory:
    """The memory of one training step: `memory(step, model, optimizer).peak_bytes`.

    Args:
        step: runs one whole step: zero gradients, forward, backward, optimizer step.
        model: the model it trains.
        optimizer: its optimizer.
        inputs: the batch, alive before the step begins; counted as activations.
        warmup: steps run first, uncounted: most optimizers make their state in the first one.

    Returns:
        The live memory after each op.
    """
    with _torch.without_compiled_code():  # as the recorded step
        for _ in range(warmup):
            step()
    with record_memory(model, optimizer, inputs) as recorder:
        step()
    return recorder.step_memory()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A context, `with fake_tensors():`, for models of any size: tensors made inside have no data.

    Code that reads values (`x.item()`, a branch on a tensor) fails inside, compiled code runs op by
    op, and the state of PyTorch's random numbers is restored at the end.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it writes a traceback of every error before raising it
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
            FakeTensorMode(),
            _torch.without_compiled_code(),
            conversions_replace_parameters(),
        ):
            # a copy's
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        log.setLevel(level)


@contextmanager
def record_memory(
    model: nn.Module, optimizer: Optimizer, inputs: Iterable[Tensor] = ()
) -> Iterator[MemoryRecorder]:
    """Count the memory of one step inside: `with record_memory(model, optimizer) as recorder:`.

    Args:
        model: the model.
        optimizer: its optimizer, whose state should exist already.
        inputs: tensors of the batch that exist before; counted as activations.

    Yields:
        The recorder: `step_memory()`, after the step, in which compiled code runs op by op.
    """
    recorder = MemoryRecorder(model, optimizer)
    with _torch.without_compiled_code(), recorder.recording(inputs, optimizer):
        yield recorder


class MemoryRecorder(OpWatcher, StepListener):
    """Registers the storage of every tensor that an op makes, and notes when the storage dies.

    `record_memory(model, optimizer)` makes one. Tensors on other devices are not counted, nor are
    `WORKSPACES` unless asked for.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, workspaces: bool = False) -> None:
        super().__init__()
        self._model, self._optimizer, self._workspaces = model, optimizer, workspaces
        self._devices = {p.device for p in model.parameters()}
        self._storages: list[LiveStorage] = []
        self._alive: dict[int, LiveStorage] = {}
        self._finalizers: list[Any] = []
        self._points: list[MemoryPoint] = []
        self._went_backward = False  # since the last forward pass

    def step_memory(self) -> StepMemory:
        """The live memory after each op.

        Raises:
            ValueError: no op ran.
        """
        kinds = {path: type(module).__name__ for path, module in self._model.named_modules()}
        others = dict.fromkeys((INPUTS, LOSS, OPTIMIZER), "")
        return StepMemory.of(self._storages, self._points, kinds | others)

    @contextmanager
    def recording(self, inputs: Iterable[Tensor] = (), *followed: Optimizer) -> Iterator[None]:
        """A context in which this counts; `inputs` as in `record_memory`.

        Optimizers that are `followed` notify this of their steps; else the caller does.
        """
        self._classify_named("parameters", self._model.named_parameters())
        self._classify_named("buffers", self._model.named_buffers())
        self._classify_gradients()
        self._classify_state()
        self._classify(inputs, "activations", INPUTS)
        with ExitStack() as stack:
            stack.callback(self._end)
            stack.enter_context(self.following(self._model, *followed, listeners=[self]))
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    hook = partial(self._on_gradient, _owner(name))
                    stack.enter_context(parameter.register_post_accumulate_grad_hook(hook))
            stack.enter_context(self)
            yield

    def _end(self) -> None:
        """The step is over: storages that die from now on are not counted."""
        # again: a module may have put new ones in their place
        self._classify_named("buffers", self._model.named_buffers())
        for finalizer in self._finalizers:  # they refer to this recorder, and it to the model
            finalizer.detach()
        self._finalizers.clear()
        self._alive.clear()

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        """Return what `run` makes of `func`, `args`, `kwargs`; may raise `DtypeMismatchError`."""
        if func.namespace in NO_OPS:
            return run()
        context, back = self.tracker.context(), _torch.in_backward()
        name = _torch.op_name(func)
        if name in SAME_DTYPE and len(dtypes := floating_dtypes(args)) > 1:
            fault = OpFault(name, context.module or "", context.phase, dtypes)
            raise DtypeMismatchError(str(fault))
        result = run()
        if name in REDUCED_IN_PLACE and _torch.is_fake(result) and result.dim() == 0:
            result.untyped_storage().resize_(args[0].nbytes)
        # The forward pass of a further micro-batch makes activations again
        self._went_backward = back or (self._went_backward and context.phase != "forward")
        later = self._went_backward or context.phase == "optimizer"
        category, owner = "temporary" if later else "activations", context.module
        if owner is None:
            owner = OPTIMIZER if context.phase == "optimizer" else LOSS
        left_out = name in WORKSPACES and not self._workspaces
        counted = result[: WORKSPACES[name]] if left_out else result
        for x in tensors_of(counted):
            if not self._is_of_before(x, (args, kwargs)):
                self._register(x, category, owner)
        phase = "backward" if back else context.phase  # a recomputation is the backward pass's
        self._points.append(MemoryPoint(name, phase, owner))
        return result

    def on_update_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._classify_gradients()

    def on_update_end(self, optimizer: Optimizer) -> None:
        self._classify_state()

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        # the batch, or most of it (all tokens but the last); not a small part of a data set
        for x in tensors_of(inputs):
            if not _has_storage(x) or _torch.storage_key(x) in self._alive:
                continue
            if 2 * x.nbytes >= x.untyped_storage().nbytes():
                self._classify([x], "activations", INPUTS)

    def _is_of_before(self, result: Tensor, arguments: Any) -> bool:
        """Whether a result is a view of a tensor that no op of the step made."""
        if not _has_storage(result) or _torch.storage_key(result) in self._alive:
            return False
        key = _torch.storage_key(result)
        return any(_has_storage(x) and _torch.storage_key(x) == key for x in tensors_of(arguments))

    def _classify(self, tensors: Iterable[Tensor], category: str, owner: str) -> None:
        """Set category and owner of the tensors' storages; new storages are registered."""
        for tensor in tensors:
            for storage in self._register(tensor, category, owner):
                storage.category, storage.owner = category, owner
                if category == "gradients":  # the product that made it may be transposed
                    storage.shape = tuple(tensor.shape)

    def _register(self, tensor: Tensor, category: str, owner: str) -> Sequence[LiveStorage]:
        if names := _parts(tensor):  # such as torchao's 8-bit state: codes and scales
            parts = [self._register(getattr(tensor, name), category, owner) for name in names]
            return [storage for part in parts for storage in part]
        if not _has_storage(tensor) or (self._devices and tensor.device not in self._devices):
            return ()
        storage = tensor.untyped_storage()
        key, nbytes, now = _torch.storage_key(tensor), storage.nbytes(), len(self._points)
        known = self._alive.get(key)
        if known is not None and known.nbytes == nbytes:
            return (known,)
        if known is None:
            self._finalizers.append(weakref.finalize(storage, self._forget, key))
        else:  # it was resized
            known.died = now
        new = LiveStorage(nbytes, category, owner, now, tuple(tensor.shape), tensor.dtype)
        self._alive[key] = new
        self._storages.append(new)
        return (new,)

    def _forget(self, key: int) -> None:
        if (dead := self._alive.pop(key, None)) is not None:
            dead.died = len(self._points)

    def _on_gradient(self, owner: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._classify([parameter.grad], "gradients", owner)

    def _classify_gradients(self) -> None:
        for name, parameter in self._model.named_parameters():
            self._on_gradient(_owner(name), parameter)

    def _classify_named(self, category: str, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, x in named:
            self._classify([x], category, _owner(name))

    def _classify_state(self) -> None:
        owners: dict[Tensor, str] = {p: _owner(name) for name, p in self._model.named_parameters()}
        for parameter, state in self._optimizer.state.items():
            owner = owners.get(parameter, OPTIMIZER)
            self._classify(tensors_of(state), "optimizer_state", owner)


def _has_storage(tensor: Tensor) -> bool:
    """Whether its numbers are in one storage: neither a wrapper (`torch.func`) nor sparse."""
    is_wrapper = _torch.is_transformed(tensor) or _parts(tensor)
    return tensor.layout is torch.strided and not is_wrapper


def _parts(tensor: Tensor) -> list[str]:
    """Attributes with the tensors inside, where it is a wrapper around others; else none."""
    wrapper: Any = tensor
    if not _torch.is_traceable_wrapper_subclass(wrapper):
        return []
    names, _ = wrapper.__tensor_flatten__()
    return [name for name in names if isinstance(getattr(wrapper, name), Tensor)]


def _owner(parameter: str) -> str:
    """The path of the module with the parameter or buffer of this name."""
    return parameter.rpartition(".")[0]
