"""Memory of a training step by category, counted from the tensors alive at its peak.

A process's resident memory says little about a model: allocators keep what was freed. Counting the
storages of live tensors gives figures that are exact, the same on every run, and split by what the
tensors are for:

    parameters, buffers     the model's
    gradients               what ends up in a parameter's `grad`
    optimizer_state         the optimizer's, once it exists
    activations             made in the forward pass: inputs, results kept for the backward pass,
                            16-bit copies of weights that autocast makes
    temporary               made in the backward pass or the optimizer step, and none of the above

They sum to the peak. The step runs on fake tensors, which have a shape, a dtype and a lifetime but
no data, so it costs no time or memory worth speaking of. What kernels use inside (oneDNN's and
cuDNN's scratch) is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mprun._torch import in_backward

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "activations",
    "temporary",
)


class _Storage:
    """One live storage: its size and what it is for."""

    def __init__(self, nbytes: int, category: str) -> None:
        self.nbytes = nbytes
        self.category = category


class _Tracker(TorchDispatchMode):
    """Sees every tensor an op makes, knows when its storage dies, remembers the largest moment."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, _Storage] = {}
        self._total = 0
        self.peak_total = 0
        self.peak: list[_Storage] = []
        self.in_optimizer = False

    def know(self, tensors: Iterable[Tensor], category: str) -> None:
        """These tensors' storages belong to `category`, whether seen before or not."""
        for tensor in tensors:
            self._see(tensor, category).category = category

    def _see(self, tensor: Tensor, category: str) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if (known := self._alive.get(key)) is not None:
            return known
        new = self._alive[key] = _Storage(storage.nbytes(), category)
        self._total += new.nbytes
        weakref.finalize(storage, self._forget, key)
        if self._total > self.peak_total:
            self.peak_total, self.peak = self._total, list(self._alive.values())
        return new

    def _forget(self, key: int) -> None:
        self._total -= self._alive.pop(key).nbytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        later = self.in_optimizer or in_backward()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, "temporary" if later else "activations")
        return result


def measure(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Iterable[Tensor] = (),
) -> dict[str, int]:
    """Bytes alive at the peak of one training step.

    Args:
        step: runs one whole step: zero gradients, forward, backward, optimizer step.
        model: the model it trains.
        optimizer: its optimizer. One step is run first, unmeasured, so that its state exists.
        inputs: the batch, alive before the step begins; counted as activations.

    Returns:
        `peak` and the six `CATEGORIES`, which sum to it.
    """
    step()
    optimizer.zero_grad()
    tracker = _Tracker()
    tracker.know(model.parameters(), "parameters")
    tracker.know(model.buffers(), "buffers")
    tracker.know(_state(optimizer), "optimizer_state")
    tracker.know(inputs, "activations")
    with _hooks(tracker, model, optimizer), tracker:
        step()
    sums = dict.fromkeys(CATEGORIES, 0)
    for storage in tracker.peak:
        sums[storage.category] += storage.nbytes
    return {"peak": tracker.peak_total, **sums}


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (v for v in state.values() if isinstance(v, Tensor))


@contextmanager
def _hooks(tracker: _Tracker, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Tell the tracker which tensors become gradients and when the optimizer steps."""

    def on_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.know([parameter.grad], "gradients")

    def on_step(active: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            tracker.in_optimizer = active

        return hook

    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(on_gradient) for p in trained]
    handles.append(optimizer.register_step_pre_hook(on_step(True)))
    handles.append(optimizer.register_step_post_hook(on_step(False)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
