"""Where the steps of a loop that mprun does not own begin and end, by hooks.

A step lasts from the first forward pass of the model to the end of the optimizer's `step()`:

    forward pre-hook      of the model, or of a part that the loop calls by itself: a step begins.
                          A forward pass without gradients, or in another mode than the first one's
                          (evaluation), begins none; nor does a recomputation in a backward pass
    step pre-hook         the gradients of an optimizer are complete; with a closure, which goes
                          forward and backward inside `step()`, they are when the closure returns
    step post-hook        its update is done; a step ends when each optimizer has stepped
    GradScaler.step       where the scaler does not call the optimizer, that step is skipped
    GradScaler.scale,     a loss goes backward: what the scaler scales, else what `backward` is
    Tensor.backward       called on

No hook changes a result; the only argument that one replaces is a closure, by one that calls it.
Copies and pickles of the model are without the hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun._torch import (
    compiles_itself,
    copied_without_hooks,
    in_backward,
    on_loss,
    on_scaler_step,
)


class StepEvents(Protocol):
    """Is notified of the parts of a step."""

    def on_step_begin(self) -> None:
        """The first forward pass begins."""

    def on_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: once for each micro-batch."""

    def on_loss(self, loss: Tensor) -> None:
        """A loss goes backward; `loss` is without a loss scale."""

    def on_other_call(self) -> None:
        """The model is called without training it: an evaluation."""

    def on_gradients(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete; its step follows."""

    def on_updated(self, optimizer: Optimizer) -> None:
        """Its step is done."""

    def on_step_end(self, skipped: bool) -> None:
        """Every optimizer has stepped; `skipped`: none of them changed its parameters."""


class StepHooks:
    """Notifies `events` of the steps of a loop.

    Args:
        model: the model. One without a forward pass of its own (`nn.ModuleList`) stands for its
            parts.
        optimizers: every optimizer of the loop.
        events: what is notified.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], events: StepEvents
    ) -> None:
        self._model, self._optimizers, self._events = model, optimizers, events
        self._in_step = False
        self._loop_counts = False
        """Whether the loop tells its calls (`begin_call`)."""
        self._training: bool | None = None
        """The mode of the first forward pass with gradients."""
        self._stepped: set[int] = set()
        """The optimizers that stepped or were skipped in this step, by `id`."""
        self._taken = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks are registered while this is entered."""
        with ExitStack() as stack:
            for module in entries(self._model):
                hook = _outside_of_graphs(self._on_forward, module)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            for optimizer in self._optimizers:
                for handle in (
                    optimizer.register_step_pre_hook(self._on_update),
                    optimizer.register_step_post_hook(self._on_updated),
                ):
                    stack.callback(handle.remove)
            stack.enter_context(on_scaler_step(self._on_scaler_step))
            stack.enter_context(on_loss(self._on_loss))
            stack.enter_context(copied_without_hooks(self._model, "mprun"))
            yield

    def begin_step(self) -> None:
        """A step begins now: for loops that know when their batch is ready."""
        if not self._in_step:
            self._in_step = True
            self._events.on_step_begin()

    def begin_call(self, batch: Any) -> None:
        """A micro-batch is ready: for loops that know; the model's calls count no more.

        Such a loop need not call the model itself: Lightning calls `training_step`.
        """
        self._loop_counts = True
        self.begin_step()
        self._events.on_call((batch,), {})

    def _on_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward():
            return
        if self._training is None and torch.is_grad_enabled():
            self._training = module.training
        if module.training != self._training or not torch.is_grad_enabled():
            self._events.on_other_call()
            return
        if not self._loop_counts:
            self.begin_step()
            self._events.on_call(args, kwargs)

    def _on_update(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.begin_step()
            self._events.on_gradients(optimizer)
            return None

        def followed() -> Any:
            loss = closure()
            self.begin_step()
            self._events.on_gradients(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": followed}
        return (args[0], followed, *args[2:]), kwargs

    def _on_updated(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        overflow = getattr(optimizer, "found_inf", None)  # of a scaler, for fused optimizers
        taken = overflow is None or overflow.device.type != "cpu" or not overflow.item()
        self._events.on_updated(optimizer)
        self._end_update(optimizer, taken)

    def _on_scaler_step(self, optimizer: Optimizer) -> None:
        """A scaler is done with an optimizer, whether it called it or not."""
        if optimizer in self._optimizers and self._in_step and id(optimizer) not in self._stepped:
            self._end_update(optimizer, taken=False)

    def _on_loss(self, loss: Tensor) -> None:
        if self._in_step:
            self._events.on_loss(loss)

    def _end_update(self, optimizer: Optimizer, taken: bool) -> None:
        self._stepped.add(id(optimizer))
        self._taken |= taken
        if len(self._stepped) == len(self._optimizers):
            skipped, self._taken, self._in_step = not self._taken, False, False
            self._stepped.clear()
            self._events.on_step_end(skipped)


def entries(model: nn.Module) -> list[nn.Module]:
    """The modules that a loop calls: the model, or the parts of one without a forward pass."""
    if type(model).forward is not nn.Module.forward:
        return [model]
    return [entry for child in model.children() for entry in entries(child)]


def _outside_of_graphs(hook: Callable[..., None], module: nn.Module) -> Callable[..., None]:
    """The hook, which `torch.compile` must not trace: of this module, or of one around it."""
    compiles = compiles_itself(module) or "torch._dynamo" in sys.modules
    return torch.compiler.disable(hook) if compiles else hook
