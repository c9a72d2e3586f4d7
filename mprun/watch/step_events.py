"""What happens in a training step: which events there are, and how they are observed.

`StepListener` names the events. Two sources notify of them, at two prices:

    StepTracker   hooks of every module, for what watches each op. It also knows in which module and
                  phase an op runs
    StepHooks     hooks of the model and of its optimizers, for loops that mprun does not own and
                  does not slow down. It finds where steps begin and end

No hook changes a result; the only argument that one replaces is a closure, by one that calls it.
Copies and pickles of the model are without the hooks.

Events of a run (`train/callbacks.py`) are others: the loop notifies of them between two steps and
some steps late, with the numbers of a record in place of tensors.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision import _torch

PHASES = ("forward", "backward", "optimizer", "other")

# Arguments and keyword arguments of an optimizer's step
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class OpContext(NamedTuple):
    """Where an op runs."""

    phase: str  # One of `PHASES`: forward is the model's, other is the loss, its scale and clipping
    module: str | None  # The path of the module, empty for the model itself; None outside of it


class StepListener:
    """Is notified of what happens in a training step; by default it does nothing.

    `StepTracker` notifies of modules and updates, and `StepHooks` of all but single modules.
    """

    def on_step_begin(self) -> None:
        """The first forward pass begins."""

    def on_micro_batch(self, module: nn.Module | None, inputs: tuple[Any, Any]) -> None:
        """A `module` gets `inputs` to train it; None: the loop itself says that they are ready."""

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        """The module at `path` gets `inputs`, not from another one: the model, or a part by itself.

        `StepTracker` notifies of every such call, also without training and in a recomputation.
        `StepHooks` notifies of those that train, with an empty path, and before `on_step_begin`:
        this time is not part of the step.
        """

    def on_module_end(self, path: str, outputs: Any) -> None:
        """The module at `path`, whoever called it, returned `outputs`; None where it raised."""

    def on_forward_end(self, path: str, outputs: Any) -> None:
        """The call of `path` that `on_forward_begin` was notified of returned `outputs`."""

    def on_evaluation(self) -> None:
        """The model is called without training it."""

    def on_loss(self, loss: Tensor) -> None:
        """A loss goes backward; `loss` is without a loss scale."""

    def on_update_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The gradients for `optimizer.step(*args[1:], **kwargs)` are complete.

        With a closure, which makes them inside of the step, they are when it has returned.
        """

    def on_update_end(self, optimizer: Optimizer) -> None:
        """The step of `optimizer` ended."""

    def on_step_end(self, skipped: bool) -> None:
        """Every optimizer has stepped; `skipped`: none of them changed its parameters."""


Listeners = Sequence[StepListener]  # Notified in this order


class StepTracker:
    """Follows a model and its optimizers through their steps.

    An op below autograd knows neither its module nor its phase. Hooks note the path of the module
    whose forward pass runs. An op of the backward pass belongs to the module whose forward pass
    made its autograd node. Autograd numbers its nodes in the order they are made, and knows which
    node runs. So the tracker notes the next number whenever a module begins or ends.
    """

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
        self, model: nn.Module, *optimizers: Optimizer | None, listeners: Listeners = ()
    ) -> Iterator[None]:
        """Know the modules of `model` and the steps of `optimizers` while this is entered."""
        with ExitStack() as stack:
            enter = stack.enter_context
            for path, module in model.named_modules():
                begin, end = self._module_hooks(path, listeners)
                # first, so that ops of the module's other hooks are known to be its own
                enter(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
                # also where `forward` raises: every path that is entered must be left
                enter(module.register_forward_hook(end, always_call=True))
            before, after = self._step_hooks(listeners)
            for optimizer in optimizers:
                if optimizer is not None:
                    enter(optimizer.register_step_pre_hook(before))
                    enter(optimizer.register_step_post_hook(after))
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
        node = _torch.backward_node()
        if node is not None:
            return OpContext("backward", self.module_of(node))
        return OpContext("optimizer" if self._optimizing else "other", None)

    def module_of(self, node: int, own_thread: bool = False) -> str | None:
        """The module that made the autograd node of this number; None outside of the model.

        Nodes of the calling thread are searched, or of all, the first one to call the model first.
        """
        threads = [threading.get_ident()] if own_thread else list(self._made)
        for thread in threads:
            # `limits` are ascending: the first one above the node ends the span with this node
            limits, modules = self._made.get(thread, ([], []))
            i = bisect_right(limits, node)
            if i < len(limits) and modules[i] is not None:
                return modules[i]
        return None

    def _note_nodes(self, module: str | None) -> None:
        """The nodes made since the last note belong to `module`."""
        limits, modules = self._made.setdefault(threading.get_ident(), ([], []))
        limits.append(_torch.next_node())
        modules.append(module)

    def _module_hooks(
        self, path: str, listeners: Listeners
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            caller = self._paths[-1] if self._paths else None
            self._paths.append(path)  # before a listener can raise: `end` is always called
            if caller is None:
                self.first_node = _torch.next_node()
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

    def _step_hooks(self, listeners: Listeners) -> tuple[Callable[..., Any], Callable[..., None]]:
        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> StepArguments | None:
            def ready() -> None:
                self.begin_update()
                for listener in listeners:
                    listener.on_update_begin(optimizer, args, kwargs)

            return when_gradients_are_complete(args, kwargs, ready, self.end_update)

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.end_update()
            for listener in listeners:
                listener.on_update_end(optimizer)

        return begin, end


class StepHooks:
    """Notifies `listeners` of the steps of a loop, in their order.

    A step lasts from the first forward pass that trains to the end of the optimizer's `step()`; of
    several optimizers, until each has stepped at least once. A forward pass that runs inside of a
    backward pass is a recomputation, and begins nothing. A model without a forward pass of its own
    (`nn.ModuleList`) stands for its parts.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], listeners: Listeners
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._calls = {
            event: [getattr(x, event) for x in listeners if getattr(type(x), event) is not silent]
            for event, silent in vars(StepListener).items()
            if event.startswith("on_")
        }
        """What is called at each event: a method that does nothing costs a step nothing."""
        self._in_step = False
        self._loop_counts = False
        """Whether the loop notifies of its calls (`begin_call`)."""
        self._training: bool | None = None
        """The mode of the first forward pass with gradients."""
        self._in_call = False
        """Whether the forward pass that ends next is one that trains."""
        self._stepped: set[int] = set()
        """The optimizers that stepped or were skipped in this step, by `id`."""
        self._taken = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks are registered while this is entered."""
        with ExitStack() as stack:
            enter = stack.enter_context
            for module in entries(self._model):
                begin = _outside_of_graphs(self._on_forward, module)
                # first, so that the inputs are those that the loop gave
                enter(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
                if self._calls["on_forward_end"]:
                    end = _outside_of_graphs(self._on_forward_end, module)
                    enter(module.register_forward_hook(end))
            for optimizer in self._optimizers:
                enter(optimizer.register_step_pre_hook(self._on_update))
                enter(optimizer.register_step_post_hook(self._on_updated))
            # A scaler may not call the optimizer at all: that step is skipped
            enter(_torch.on_scaler_step(self._on_scaler_step))
            # What a scaler scales, else what `backward` is called on
            enter(_torch.on_loss(self._on_loss))
            enter(_torch.copied_without_hooks(self._model, "mprun"))
            yield

    def _notify(self, event: str, *args: Any) -> None:
        for call in self._calls[event]:
            call(*args)

    def begin_step(self) -> None:
        """A step begins now: for loops that know when their batch is ready."""
        if not self._in_step:
            self._in_step = True
            self._notify("on_step_begin")

    def begin_call(self, batch: Any) -> None:
        """A micro-batch is ready: for loops that know; the model's calls count no more.

        Such a loop need not call the model itself: Lightning calls `training_step`.
        """
        self._loop_counts = True
        self._begin_micro_batch(None, ((batch,), {}))

    def _begin_micro_batch(self, module: nn.Module | None, inputs: tuple[Any, Any]) -> None:
        self.begin_step()
        self._notify("on_micro_batch", module, inputs)

    def _on_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._in_call = False
        if _torch.in_backward():  # a recomputation
            return
        # Reentrant checkpointing calls what it recomputes later in an autograd function
        trains = torch.is_grad_enabled() or _torch.in_autograd_function()
        # Validation between steps runs in the other mode, also where its gradients are left on
        if self._training is None and trains:
            self._training = module.training
        if module.training != self._training or not trains:
            self._notify("on_evaluation")
            return
        self._in_call = True
        self._notify("on_forward_begin", "", (args, kwargs))
        if not self._loop_counts:
            self._begin_micro_batch(module, (args, kwargs))

    def _on_forward_end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._in_call:
            self._in_call = False
            self._notify("on_forward_end", "", outputs)

    def _on_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> StepArguments | None:
        def ready() -> None:
            self.begin_step()
            self._notify("on_update_begin", optimizer, args, kwargs)

        return when_gradients_are_complete(args, kwargs, ready)

    def _on_updated(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        overflow = getattr(optimizer, "found_inf", None)  # of a scaler, for fused optimizers
        # On a GPU the flag is not read: the host would wait for the device at every step
        taken = overflow is None or overflow.device.type != "cpu" or not overflow.item()
        self._notify("on_update_end", optimizer)
        self._end_update(optimizer, taken)

    def _on_scaler_step(self, optimizer: Optimizer) -> None:
        """A scaler is done with an optimizer, whether it called it or not."""
        if optimizer in self._optimizers and self._in_step and id(optimizer) not in self._stepped:
            self._end_update(optimizer, taken=False)

    def _on_loss(self, loss: Tensor) -> None:
        # reentrant checkpointing goes backward inside
        if self._in_step and not _torch.in_backward():
            self._notify("on_loss", loss)

    def _end_update(self, optimizer: Optimizer, taken: bool) -> None:
        self._stepped.add(id(optimizer))
        self._taken |= taken
        if len(self._stepped) == len(self._optimizers):
            skipped, self._taken, self._in_step = not self._taken, False, False
            self._stepped.clear()
            self._notify("on_step_end", skipped)


def when_gradients_are_complete(
    args: Any, kwargs: Any, ready: Callable[[], None], incomplete: Callable[[], None] = lambda: None
) -> StepArguments | None:
    """Call `ready` once the gradients of `optimizer.step(*args[1:], **kwargs)` are complete.

    A closure goes forward and backward inside of the step: the arguments that are returned have one
    that calls `incomplete` before it and `ready` after it. Without a closure that is now.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        ready()
        return None

    def followed() -> Any:
        incomplete()
        loss = closure()
        ready()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": followed}
    return (args[0], followed, *args[2:]), kwargs


def entries(model: nn.Module) -> list[nn.Module]:
    """The modules that a loop calls: the model, or the parts of one without a forward pass."""
    if _torch.is_compiled(model) or type(model).forward is not nn.Module.forward:
        return [model]
    return [entry for child in model.children() for entry in entries(child)]


def _outside_of_graphs(hook: Callable[..., None], module: nn.Module) -> Callable[..., None]:
    """The hook, which `torch.compile` must not trace: of this module, or of one around it."""
    # `torch.compiler.disable` imports the compiler (1.3 s): not while nothing has compiled anything
    compiles = _torch.compiles_itself(module) or "torch._dynamo" in sys.modules
    return torch.compiler.disable(hook) if compiles else hook


def plain_optimizers(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """The optimizers, each once, in order, without the wrappers of Accelerate and Lightning.

    Raises:
        TypeError: one is no optimizer.
    """
    if given is None or isinstance(given, Optimizer) or not isinstance(given, Iterable):
        given = [] if given is None else [given]
    unwrapped: dict[Optimizer, None] = {}
    for x in given:
        while isinstance(inner := getattr(x, "optimizer", None), Optimizer):
            x = inner
        if not isinstance(x, Optimizer):
            raise TypeError(
                f"optimizer holds {type(x).__name__}; legal: an optimizer, several, or None"
            )
        unwrapped[x] = None
    return list(unwrapped)
