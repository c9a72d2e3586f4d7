"""Where in a training step an op runs: its module and its phase.

An op below autograd knows neither. Hooks keep the path of the module whose forward pass runs; an op
of the backward pass has the path of the forward op whose gradient it computes. Autograd numbers its
nodes as they are made: the number is read when a forward op runs, and again from the node that runs
in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from mprun._torch import backward_node, next_node

PHASES = ("forward", "backward", "optimizer", "other")


class Place(NamedTuple):
    """Where an op runs."""

    phase: str
    """One of `PHASES`: forward is the model's, other is the loss, its scale and clipping."""
    module: str | None
    """The path of the module, empty for the model itself; None outside of it."""


class Follower:
    """Follows a model and its optimizer through their steps."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._module_of: dict[int, str] = {}
        self._before_model = 0
        self._optimizing = False

    @contextmanager
    def following(self, model: nn.Module, *optimizers: Optimizer | None) -> Iterator[None]:
        """Know the modules of `model` and the steps of `optimizers` while this is entered."""
        with ExitStack() as stack:
            for path, module in model.named_modules():
                enter, leave = self._hooks(path)
                for handle in (
                    module.register_forward_pre_hook(enter, prepend=True),
                    module.register_forward_hook(leave, always_call=True),
                ):
                    stack.callback(handle.remove)
            for optimizer in optimizers:
                if optimizer is not None:
                    before = optimizer.register_step_pre_hook(self._on_step(True))
                    after = optimizer.register_step_post_hook(self._on_step(False))
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            try:
                yield
            finally:
                self._paths.clear()
                self._optimizing = False

    def forget_graph(self) -> None:
        """Let go of the nodes of a graph that is gone."""
        self._module_of.clear()

    def forget(self) -> None:
        """Let go of what was kept of steps that are done."""
        self.forget_graph()
        self._paths.clear()
        self._optimizing = False

    def place(self) -> Place:
        """Where the op runs that runs next."""
        node = backward_node()
        if self._paths:  # forward code, run again in the backward pass or not
            path = self._paths[-1]
            # The node was made just before its op runs; that of an autograd function of one's own,
            # whose forward pass runs without a graph, too.
            if (made := next_node() - 1) >= self._before_model:
                self._module_of.setdefault(made, path)
            return Place("forward", path)
        if node is not None:
            return Place("backward", self._module_of.get(node))
        return Place("optimizer" if self._optimizing else "other", None)

    def _hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(*_: object) -> None:
            if not self._paths:
                self._before_model = next_node()
            self._paths.append(path)

        def leave(*_: object) -> None:
            self._paths.pop()

        return enter, leave

    def _on_step(self, active: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self._optimizing = active

        return hook
