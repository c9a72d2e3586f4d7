"""Every op of a training step, as it runs: what later tools build on.

A `TorchDispatchMode` sees each op below autograd and autocast, casts included. What it cannot see
is why the op runs, so three things are told alongside:

    module   the path of the module whose forward pass runs, or whose gradient is computed
    phase    forward (of the model), backward, optimizer, or other (loss, loss scale, clipping);
             both are found by `place.Follower`
    call     the Python call that led to the op, where a caller keeps track of it (`Calls`)

Times are of the op's kernel and the dispatcher, not of the Python code around it; on CUDA the
device is waited for before and after, so they add up to more than a step that overlaps them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mprun.numerics.fault import Fault, floating_dtypes
from mprun.numerics.place import PHASES, Follower

__all__ = ["PHASES", "Observer", "Op", "Value"]


class Value(NamedTuple):
    """A tensor an op took or made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    memory: tuple[int, int]
    """Storage and version: while two values live, equal where one's numbers are in the other."""
    place: tuple[int, ...]
    """Offset and strides in the storage."""


@dataclass(frozen=True)
class Op:
    """One op that ran."""

    name: str
    """ATen's, without the overload: `addmm`."""
    phase: str
    """One of `PHASES`."""
    module: str
    """The path of the module, empty outside of the model."""
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    began_s: float
    """By `time.perf_counter`."""
    time_s: float
    is_view: bool
    """Whether it only looks at its input in another way."""
    call: Any
    """What `call` gave when it ran."""

    @property
    def is_cast(self) -> bool:
        """Whether it copies a tensor into another dtype."""
        copies = self.name == "_to_copy" and len(self.inputs) == 1
        return copies and self.inputs[0].dtype != self.outputs[0].dtype


class Following(TorchDispatchMode):
    """A mode that knows which module and phase the op it meets belongs to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._follower = Follower()
        self._muted = False
        """Whether an op is being carried out: what a mode below makes of it is not met."""

    @contextmanager
    def region(self) -> Iterator[None]:
        """Entered like the arithmetic's regions."""
        with self:
            yield

    @contextmanager
    def following(self, model: nn.Module, *optimizers: Optimizer | None) -> Iterator[None]:
        """Know the modules of `model` and the steps of `optimizers` while this is entered."""
        with self._follower.following(model, *optimizers):
            try:
                yield
            finally:
                self.forget()

    def forget(self) -> None:
        """Let go of what was kept of steps that are done."""
        self._follower.forget()

    def _where(self) -> tuple[str, str]:
        """Phase and module of the op that runs next."""
        place = self._follower.place()
        return place.phase, place.module or ""


class Observer(Following):
    """Tells of each op while it is entered.

    Args:
        tell: is called after each op.
        call: gives what is to be kept as an op's `call`.
        synchronize: waits for the device; None on the CPU.
    """

    def __init__(
        self,
        tell: Callable[[Op], None],
        call: Callable[[], Any] = lambda: None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._tell = tell
        self._call = call
        self._wait = synchronize or _no_wait
        self._held: list[Any] = []
        self.fault: Fault | None = None
        """The last op that raised, where one did."""

    def forget(self) -> None:
        super().forget()
        self._held.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        where = self._where()
        inputs = tuple(_values((args, kwargs)))
        self._wait()
        began = time.perf_counter()
        self._muted = True  # of what a mode below makes of the op
        try:
            result = func(*args, **kwargs)
        except Exception:
            name = func.overloadpacket.__name__
            self.fault = Fault(name, where[1], where[0], floating_dtypes((args, kwargs)))
            raise
        finally:
            self._muted = False
        self._wait()
        took = time.perf_counter() - began
        name = func.overloadpacket.__name__
        outputs = tuple(_values(result))
        op = Op(name, *where, inputs, outputs, began, took, _is_view(func), self._call())
        if not inputs and not outputs:  # a profiler's mark
            return result
        if op.is_cast:  # memory that is freed would be given out again, and casts mixed up
            self._held += [x.untyped_storage() for x in (args[0], result)]
        self._tell(op)
        return result


def _values(tree: Any) -> Iterable[Value]:
    for x in tree_leaves(tree):
        if isinstance(x, Tensor):
            version = 0 if x.is_inference() else x._version
            memory = (x.untyped_storage()._cdata, version)
            place = (x.storage_offset(), *x.stride()) if x.layout == torch.strided else ()
            nbytes = x.numel() * x.element_size()
            yield Value(x.dtype, tuple(x.shape), nbytes, memory, tuple(map(int, place)))


@functools.cache
def _is_view(func: Any) -> bool:
    aliases = (r.alias_info for r in func._schema.returns)
    return any(a is not None and not a.is_write for a in aliases)


def _no_wait() -> None:
    pass
