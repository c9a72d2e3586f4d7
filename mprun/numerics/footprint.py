"""Memory of a training step, counted from the tensors alive: by category, by module, over time.

A process's resident memory says little about a model: allocators keep what was freed. Counting the
storages of live tensors gives figures that are exact, the same on every run, and split by what the
tensors are for:

    parameters, buffers     the model's
    gradients               what ends up in a parameter's `grad`
    optimizer_state         the optimizer's, once it exists
    activations             made in the forward pass: inputs, results kept for the backward pass,
                            16-bit copies of weights that autocast makes
    temporary               made in the backward pass or after it, and none of the above

A storage has one category for as long as it lives: a tensor of the backward pass that becomes a
gradient in the end was one from the start. So the categories sum to what is alive, at every op.

Each storage also has an owner: parameters, buffers, gradients and optimizer state the module that
holds the parameter, activations the module whose forward pass made them, temporaries the one whose
gradient was being computed.

The step may run on real tensors, or on fake ones (`fake_tensors`), which have a shape, a dtype and
a lifetime but no data: then it costs no time or memory worth speaking of, and a model larger than
the machine can be counted. What kernels use inside (oneDNN's and cuDNN's scratch) is not seen, nor
what an allocator adds by rounding up.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from mprun._torch import FakeTensorMode, in_backward
from mprun.numerics.fault import check_dtypes
from mprun.numerics.place import Follower, Place
from mprun.numerics.step_memory import Held, Point, StepMemory

INPUTS, LOSS, OPTIMIZER = "(inputs)", "(loss)", "(optimizer)"
"""Owners that are no module; `(loss)` is all that runs outside of model and optimizer."""

NO_OPS = ("prim", "profiler")
"""Where what is called is no op: a fake tensor is asked for its device, a profiler's mark."""


def memory(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: Optimizer,
    inputs: Iterable[Tensor] = (),
    warmup: int = 1,
) -> StepMemory:
    """The memory of one training step.

    Args:
        step: runs one whole step: zero gradients, forward, backward, optimizer step.
        model: the model it trains.
        optimizer: its optimizer.
        inputs: the batch, alive before the step begins; counted as activations.
        warmup: steps run first, uncounted: most optimizers make their state in the first one.

    Returns:
        What was alive after each op.
    """
    for _ in range(warmup):
        step()
    with record_memory(model, optimizer, inputs) as recorder:
        step()
    return recorder.found()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside have no data: a model of any size can be made, and a step of it counted.

    Code that looks at values (`x.item()`, a branch on a tensor) fails inside. The state of
    PyTorch's random numbers is put back on the way out.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it writes a traceback of every error before raising it
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), FakeTensorMode():
            warnings.filterwarnings(
                "ignore", "Accessing the data pointer of FakeTensor"
            )  # a copy's
            yield
    finally:
        log.setLevel(level)


@contextmanager
def record_memory(
    model: nn.Module, optimizer: Optimizer, inputs: Iterable[Tensor] = ()
) -> Iterator[MemoryRecorder]:
    """Count what is alive while one step runs inside, in a loop of one's own.

    Args:
        model: the model.
        optimizer: its optimizer, whose state should exist already.
        inputs: tensors of the batch that exist before; counted as activations.
    """
    recorder = MemoryRecorder(model, optimizer)
    recorder.begin(inputs)
    with ExitStack() as stack:
        stack.callback(recorder.end)
        stack.enter_context(recorder.follower.following(model, optimizer))
        for handle in recorder.hooks():
            stack.callback(handle.remove)
        with recorder:
            yield recorder


class MemoryRecorder(TorchDispatchMode):
    """Sees every tensor an op makes and knows when its storage dies.

    Tensors on other devices than the model's are not counted.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.follower = Follower()
        self._model, self._optimizer = model, optimizer
        self._devices = {p.device for p in model.parameters()}
        self._held: list[Held] = []
        self._alive: dict[int, Held] = {}
        self._finalizers: list[Any] = []
        self._points: list[Point] = []
        self._gone_back = False  # the backward pass has run since the last forward pass

    def found(self) -> StepMemory:
        """What was alive after each op.

        Raises:
            ValueError: no op ran.
        """
        return StepMemory.of(self._held, self._points, dict(self._kinds()))

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Count what exists before the step."""
        for name, parameter in self._model.named_parameters():
            self._know([parameter], "parameters", _owner(name))
        self._know_buffers()
        self._know_gradients()
        self._know_state()
        self._know(inputs, "activations", INPUTS)

    def end(self) -> None:
        """The step is over: what dies from now on is not counted."""
        self._know_buffers()  # a module may have put new ones in their place
        for finalizer in self._finalizers:  # they would keep the model alive
            finalizer.detach()
        self._finalizers.clear()
        self._alive.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        place, back = self.follower.place(), in_backward()
        check_dtypes(func, args, place.module or "", place.phase)
        result = func(*args, **(kwargs or {}))
        if func.namespace in NO_OPS:
            return result
        self._gone_back = back or (self._gone_back and place.phase != "forward")
        later = self._gone_back or place.phase == "optimizer"
        category, owner = "temporary" if later else "activations", _named(place)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, category, owner)
        phase = "backward" if back else place.phase  # recomputing is the backward pass's
        self._points.append(Point(func.overloadpacket.__name__, phase, owner))
        return result

    def _know(self, tensors: Iterable[Tensor], category: str, owner: str) -> None:
        """These tensors' storages are `category` of `owner`, whether seen before or not."""
        for tensor in tensors:
            for held in self._see(tensor, category, owner):
                held.category, held.owner = category, owner

    def _see(self, tensor: Tensor, category: str, owner: str) -> Sequence[Held]:
        if names := _parts(tensor):
            seen = [self._see(getattr(tensor, name), category, owner) for name in names]
            return [held for part in seen for held in part]
        if self._devices and tensor.device not in self._devices:
            return ()
        storage = tensor.untyped_storage()
        key, nbytes, now = storage._cdata, storage.nbytes(), len(self._points)
        known = self._alive.get(key)
        if known is not None and known.nbytes == nbytes:
            return (known,)
        if known is None:
            self._finalizers.append(weakref.finalize(storage, self._forget, key))
        else:  # it was resized
            known.died = now
        new = Held(nbytes, category, owner, now, tuple(tensor.shape), str(tensor.dtype))
        self._alive[key] = new
        self._held.append(new)
        return (new,)

    def _forget(self, key: int) -> None:
        if (held := self._alive.pop(key, None)) is not None:
            held.died = len(self._points)

    def hooks(self) -> Iterator[Any]:
        """Hooks that tell which tensors become gradients and state."""

        def on_gradient(owner: str) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                if parameter.grad is not None:
                    self._know([parameter.grad], "gradients", owner)

            return hook

        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(on_gradient(_owner(name)))
        yield self._optimizer.register_step_pre_hook(lambda *_: self._know_gradients())
        yield self._optimizer.register_step_post_hook(lambda *_: self._know_state())

    def _know_buffers(self) -> None:
        for name, buffer in self._model.named_buffers():
            self._know([buffer], "buffers", _owner(name))

    def _know_gradients(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._know([parameter.grad], "gradients", _owner(name))

    def _know_state(self) -> None:
        owners: dict[Tensor, str] = {p: _owner(name) for name, p in self._model.named_parameters()}
        for parameter, state in self._optimizer.state.items():
            tensors = [x for x in tree_leaves(state) if isinstance(x, Tensor)]
            self._know(tensors, "optimizer_state", owners.get(parameter, OPTIMIZER))

    def _kinds(self) -> Iterator[tuple[str, str]]:
        """Owners in the order of the model, the others last, with the class of each module."""
        for path, module in self._model.named_modules():
            yield path, type(module).__name__
        for owner in (INPUTS, LOSS, OPTIMIZER):
            yield owner, ""


def _parts(tensor: Tensor) -> list[str]:
    """Attributes with the tensors inside, where it is a wrapper around others; else none."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return []
    names, _ = wrapper.__tensor_flatten__()
    return list(names)


def _owner(parameter: str) -> str:
    """The path of the module that holds a parameter or buffer of this name."""
    return parameter.rpartition(".")[0]


def _named(place: Place) -> str:
    if place.module is not None:
        return place.module
    return OPTIMIZER if place.phase == "optimizer" else LOSS
