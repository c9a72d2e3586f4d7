"""Where in a training step an op runs: its module and its phase.

An op below autograd knows neither. Hooks keep the path of the module whose forward pass runs. An op
of the backward pass belongs to the module whose forward pass made its autograd node. Autograd
numbers its nodes in the order they are made, and knows which node runs. So the tracker notes the
next number whenever a module begins or ends: so it knows which module made which numbers.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from mprun._torch import backward_node, next_node

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
