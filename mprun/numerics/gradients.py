"""The largest gradient of a backward pass, and the op that it belongs to.

A loss scale must not be too large for *any* number of the backward pass. Many of these numbers are
the gradient of no module's output: those inside attention, or of weights before they are cast back
to float32. So autograd's graph is walked from the outputs of the model, and a hook on every node
measures the gradients that the node receives.

Numbers inside a single kernel cannot be measured, nor anything inside compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from mprun._torch import node_number, outside_of_modes
from mprun.numerics.op_watcher import tensors_of
from mprun.numerics.tracker import StepListener, StepTracker

ROOT = "(model)"
"""The name of the model itself, whose path is empty."""

PARAMETER = "parameter"


class GradientSource(NamedTuple):
    """The tensor that a gradient belongs to."""

    module: str
    """The path of the module, or the parameter's name."""
    op: str
    """The op of the forward pass whose output it is the gradient of, or `PARAMETER`."""
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.module if self.op == PARAMETER else f"{self.op} in {self.module}"


class LargestGradients(StepListener):
    """Keeps the largest magnitude of each source; NaN and infinities as infinite.

    Args:
        unscaled: returns the divisor of magnitudes, the loss scale; called in the backward pass.
    """

    def __init__(self, unscaled: Callable[[], float] = lambda: 1.0) -> None:
        self.magnitudes: dict[GradientSource, float] = {}
        self.tracker = StepTracker()
        self._scale = unscaled
        self._active = False
        self._names: dict[int, str] = {}

    def worst(self) -> tuple[float, GradientSource | None]:
        """The largest that float16 has to represent: of those in float16, or of all if none is."""
        low = {p: v for p, v in self.magnitudes.items() if p.dtype == torch.float16}
        low = low or self.magnitudes
        source = max(low, key=lambda p: low[p], default=None)
        return (0.0, None) if source is None else (low[source], source)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Measure what `model` computes while this is entered, backward passes included."""
        with self.tracker.following(model, listeners=[self]), self.parameter_hooks(model):
            yield

    @contextmanager
    def parameter_hooks(self, model: nn.Module) -> Iterator[None]:
        """Measure the parameters' gradients; for callers whose tracker notifies this already."""
        self._names = {id(p): name for name, p in model.named_parameters()}
        with ExitStack() as stack:
            for name, p in model.named_parameters():
                if p.requires_grad:
                    measure = self._measure(name, PARAMETER)
                    hook = p.register_hook(lambda g, measure=measure: measure((g,)))
                    stack.callback(hook.remove)
            try:
                yield
            finally:
                self._active = False

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        self._active = True
        self.tracker.forget_graph()

    def on_forward_end(self, path: str, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self.follow(outputs)

    def follow(self, outputs: Any) -> None:
        """Hook the nodes that led to `outputs` since the model was last called."""
        todo = [x.grad_fn for x in tensors_of(outputs) if x.grad_fn is not None]
        seen = set(todo)
        while todo:
            node = todo.pop()
            number = node_number(node)
            if number is None or number < self.tracker.first_node:
                continue  # a parameter's, or made before: of another call
            where = _parameter_behind(node, self._names) or (self._module(number), _op(node))
            node.register_prehook(self._measure(*where))  # dies with the node
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)

    def _module(self, number: int) -> str:
        module = self.tracker.module_of(number, own_thread=True)
        return "the loss" if module is None else module or ROOT

    def _measure(self, module: str, op: str) -> Callable[[tuple[Tensor | None, ...]], None]:
        def measure(gradients: tuple[Tensor | None, ...]) -> None:
            if not self._active:
                return
            for gradient in gradients:
                if gradient is not None and gradient.numel() and gradient.is_floating_point():
                    self._add(GradientSource(module, op, gradient.dtype), gradient)

        return measure

    def _add(self, source: GradientSource, gradient: Tensor) -> None:
        with outside_of_modes():
            size = float(torch.linalg.vector_norm(gradient, math.inf)) / self._scale()
        size = size if math.isfinite(size) else math.inf
        self.magnitudes[source] = max(self.magnitudes.get(source, 0.0), size)


def _op(node: Node) -> str:
    return node.name().rpartition("Backward")[0] or node.name()


def _parameter_behind(node: Node, names: Mapping[int, str]) -> tuple[str, str] | None:
    """The parameter whose gradient a node passes on: unchanged, cast or transposed."""
    following: Node | None = node
    while following is not None and following.name() in _PASSES_ON:
        following = following.next_functions[0][0]
    name = names.get(id(getattr(following, "variable", None)))
    return None if name is None else (name, PARAMETER)


_PASSES_ON = ("TBackward0", "ToCopyBackward0", "TransposeBackward0")
