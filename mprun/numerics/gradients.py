"""The largest gradient of a backward pass, and where it arose.

A loss scale must not be too large for *any* number of the backward pass, and many of them are the
gradient of no module's output: those inside attention, or of weights before they are cast back to
float32. So autograd's graph is walked from the outputs of the model, and every node says what it is
given. Nodes are numbered as they are made; which module was running then is known from hooks.

What a single kernel computes inside is not seen, and nothing is seen inside compiled code.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from mprun._torch import next_node, node_number, outside_of_modes

ROOT = "(model)"
"""What the model itself is called, whose path is empty."""


PARAMETER = "parameter"


class Place(NamedTuple):
    """Where a gradient arose."""

    module: str
    op: str
    """The op of the forward pass whose output it is the gradient of, or `PARAMETER`."""
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.module if self.op == PARAMETER else f"{self.op} in {self.module}"


class LargestGradients:
    """Keeps the largest magnitude seen at each place; NaN and infinities as infinite.

    Args:
        unscaled: what a gradient's magnitude is divided by, asked in the backward pass.
    """

    def __init__(self, unscaled: Callable[[], float] = lambda: 1.0) -> None:
        self.found: dict[Place, float] = {}
        self._scale = unscaled
        self._active = False
        self._began = 0
        self._until: list[int] = []
        self._modules: list[str] = []
        self._paths: list[str] = []
        self._names: dict[int, str] = {}

    def worst(self) -> tuple[float, Place | None]:
        """The largest that float16 has to hold: those in float16, or all where none is."""
        low = {p: v for p, v in self.found.items() if p.dtype == torch.float16} or self.found
        place = max(low, key=lambda p: low[p], default=None)
        return (0.0, None) if place is None else (low[place], place)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Look at what `model` computes while this is entered, backward passes included."""
        with ExitStack() as stack:
            for path, module in model.named_modules():
                enter, leave = self._hooks(path or ROOT)
                for handle in (
                    module.register_forward_pre_hook(enter, prepend=True),
                    module.register_forward_hook(leave, always_call=True),
                ):
                    stack.callback(handle.remove)
            self._names = {id(p): name for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                if p.requires_grad:
                    look = self._look(name, PARAMETER)
                    stack.callback(p.register_hook(lambda g, look=look: look((g,))).remove)
            try:
                yield
            finally:
                self._active = False
                self._forget()

    def follow(self, outputs: Any) -> None:
        """Look at the gradients of what led to `outputs` since the model was last called."""
        found = (x.grad_fn for x in tree_leaves(outputs) if isinstance(x, Tensor))
        todo: list[Node] = [node for node in found if node is not None]
        seen = set(todo)
        while todo:
            node = todo.pop()
            number = node_number(node)
            if number is None or number < self._began:
                continue  # a parameter's, or made before: of another call
            where = _parameter_behind(node, self._names) or (self._module(number), _op(node))
            node.register_prehook(self._look(*where))  # dies with the node
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)

    def _hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(*_: object) -> None:
            if not self._paths:
                self._forget()
                self._active, self._began = True, next_node()
            self._mark()
            self._paths.append(path)

        def leave(module: nn.Module, inputs: object, outputs: object) -> None:
            self._mark()
            self._paths.pop()
            if not self._paths and torch.is_grad_enabled():
                self.follow(outputs)

        return enter, leave

    def _mark(self) -> None:
        """Nodes made since the last mark belong to the module that is running."""
        self._until.append(next_node())
        self._modules.append(self._paths[-1] if self._paths else "")

    def _forget(self) -> None:
        """Of a call of the model nothing is needed once the next one begins."""
        self._until.clear()
        self._modules.clear()
        self._paths.clear()

    def _module(self, number: int) -> str:
        i = bisect_right(self._until, number)
        return self._modules[i] if i < len(self._modules) else "the loss"

    def _look(self, module: str, op: str) -> Callable[[tuple[Tensor | None, ...]], None]:
        def look(gradients: tuple[Tensor | None, ...]) -> None:
            if not self._active:
                return
            for gradient in gradients:
                if gradient is not None and gradient.numel() and gradient.is_floating_point():
                    self._keep(Place(module, op, gradient.dtype), gradient)

        return look

    def _keep(self, place: Place, gradient: Tensor) -> None:
        with outside_of_modes():
            size = float(torch.linalg.vector_norm(gradient, math.inf)) / self._scale()
        size = size if math.isfinite(size) else math.inf
        self.found[place] = max(self.found.get(place, 0.0), size)


def _op(node: Node) -> str:
    return node.name().rpartition("Backward")[0] or node.name()


def _parameter_behind(node: Node, names: Mapping[int, str]) -> tuple[str, str] | None:
    """The parameter that a node hands its gradient to as it is, or cast or transposed."""
    following: Node | None = node
    while following is not None and following.name() in _ON_THE_WAY:
        following = following.next_functions[0][0]
    name = names.get(id(getattr(following, "variable", None)))
    return None if name is None else (name, PARAMETER)


_ON_THE_WAY = ("TBackward0", "ToCopyBackward0", "TransposeBackward0")
