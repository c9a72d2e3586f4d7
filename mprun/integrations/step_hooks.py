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

What is looked at in single steps at the start, none of which is timed.

step 1      the state of autocast at every layer
step 2      the casts of the model's first call; the audit, where the gradients are complete
steps 3, 4  memory op by op, if it is asked for; optimizers have made their state by then

The last part of a training: what it is judged by, and whether the model still trained in it.

A mean of the losses of all steps hides what a model became, and a loss that is NaN has no mean. So
a training is judged by its last tenth, at least 20 steps; and one that is dead there has failed:

    the loss is not finite to the end, in a step that was taken or for the whole last part
    no step is taken in the last part: the loss scale skips all of them

Whether gradients are finite, at a price that a training step does not notice.

Every gradient is read once: the sum of its squares (of its values in 16 bits) is finite only if
each value is. A sum may overflow without a fault, so an alarm is confirmed value by value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import ceil, isfinite
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun._torch import (
    compiles_itself,
    copied_without_hooks,
    in_backward,
    is_compiled,
    on_loss,
    on_scaler_step,
    storage_key,
    tree_leaves,
)
from mprun.errors import first_line
from mprun.integrations.observed_precision import AutocastReader
from mprun.numerics.audit import Audit, audit
from mprun.numerics.cast_counts import CastCounts
from mprun.numerics.memory_recorder import MemoryRecorder


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


SHARE, MIN_STEPS = 0.1, 20


def last_steps(steps: int) -> int:
    """How many steps of a training with so many are its last part."""
    return min(steps, max(MIN_STEPS, ceil(steps * SHARE)))


class LastPart:
    """Follows the steps to the end of a training."""

    def __init__(self) -> None:
        self._steps = 0
        self._skipped_from: int | None = None
        """The first of the steps that were skipped, all of them since."""
        self._broken_from: int | None = None
        """The first step whose loss was not finite, as no known loss has been since."""
        self._broken_loss = 0.0
        self._took_broken = False
        """Whether a step with such a loss was taken."""

    def add(self, step: int, loss: float | None, skipped: bool) -> None:
        """The next step.

        Args:
            step: its number.
            loss: NaN or infinite where any loss was; None where it is not known.
            skipped: whether the loss scale skipped it.
        """
        self._steps = step
        self._skipped_from = (self._skipped_from or step) if skipped else None
        if loss is None:
            return
        if isfinite(loss):
            self._broken_from, self._took_broken = None, False
            return
        self._broken_from, self._broken_loss = self._broken_from or step, loss
        self._took_broken |= not skipped

    def failure(self) -> str:
        """Why the model does not train at the end; empty if it does."""
        last, least = self._steps, last_steps(self._steps)
        since = self._broken_from
        if since is not None and (self._took_broken or last - since + 1 >= least):
            skipped = "" if self._took_broken else "; the loss scale skips them, and cannot help"
            where = f"from step {since} to" if since < last else "at"
            return f"the loss is {self._broken_loss} {where} the last step, {last}{skipped}"
        since = self._skipped_from
        if since is not None and last - since + 1 >= least:
            return (
                f"no step was taken from step {since} to the last one, {last}: their gradients "
                "overflowed, and the loss scale skipped them"
            )
        return ""


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's next step reads."""
    held = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [_values(g) for g in held if g is not None]


def all_finite(tensors: list[Tensor]) -> Tensor | bool:
    """Whether every value is finite; False, too, where a sum overflows.

    A boolean on the CPU; elsewhere a tensor, which is read later so that nothing waits for it.
    """
    with torch.no_grad():
        if all(x.is_cpu for x in tensors):
            return isfinite(sum([float(_sum(x)) for x in tensors]))
        sums = [_sum(x).to(tensors[0].device, torch.float32) for x in tensors]
        return torch.stack(sums).isfinite().all()


def _sum(x: Tensor) -> Tensor:
    if x.dtype is torch.float32 and x.is_contiguous():
        flat = x.view(-1)
        return flat.dot(flat)
    return x.sum(dtype=torch.float32)


def nonfinite_names(tensors: Mapping[str, Tensor | None]) -> Iterator[str]:
    """The names of those with a NaN or an infinity, value by value."""
    for name, x in tensors.items():
        if x is not None and x.is_floating_point() and not _values(x).isfinite().all():
            yield name


def gradients_by_name(model: nn.Module) -> dict[str, Tensor | None]:
    """`gradient of fc1.weight` and so on."""
    return {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}


def _values(x: Tensor) -> Tensor:
    """The stored values of a sparse tensor."""
    x = x.detach() if x.requires_grad else x
    return x.coalesce().values() if x.is_sparse else x


AUDITED_STEP = 2
RECORDED_STEPS = (3, 4)


class StepProbes:
    """Looks at single steps.

    Args:
        model, optimizers: what trains.
        memory: whether memory is counted by category.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], memory: bool) -> None:
        self._model, self._optimizers = model, optimizers
        self._stack = ExitStack()
        self._recorder: MemoryRecorder | None = None
        self.autocast = AutocastReader(model)
        self.audit: Audit | None = None
        self.notes: list[str] = []
        """What could not be looked at, and why."""
        self.memory_bytes: dict[str, int] = {}
        """Bytes by category at the larger peak of the recorded steps."""
        self._gradient_bytes = 0
        self._casts: CastCounts | None = None
        self._recorded = RECORDED_STEPS if memory and self._can_record() else ()

    def is_timed(self, step: int) -> bool:
        """Whether nothing is looked at in this step."""
        return step > AUDITED_STEP and step not in self._recorded

    def before(self, step: int) -> None:
        """The step number `step` is the next one: called before anything of it runs."""
        if step == 1:
            self._stack.enter_context(self.autocast.attached())
        if step == AUDITED_STEP and not any(map(is_compiled, self._model.modules())):
            self._casts = CastCounts(self._model)
            self._stack.enter_context(self._casts.next_call(entries(self._model)))
        if step in self._recorded:
            self._record()

    def on_call(self, step: int) -> None:
        """The model is called in this step."""
        if step == 1:
            self.autocast.note()

    def on_gradients(self, step: int, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete."""
        if self._recorder is not None:
            self._recorder.tracker.begin_update()
            self._recorder.on_update_begin(optimizer, (), {})
        if step == AUDITED_STEP:
            self._gradient_bytes += _bytes(gradients(optimizer))
            self._audit(optimizer)

    def on_updated(self, optimizer: Optimizer) -> None:
        """An update is done."""
        if self._recorder is not None:
            self._recorder.tracker.end_update()
            self._recorder.on_update_end(optimizer)

    def after(self, step: int) -> None:
        """The step is over."""
        if step <= AUDITED_STEP or step in self._recorded:
            self.close()

    def bytes_by_category(self) -> dict[str, int]:
        """Bytes by category: at the peak, if memory was recorded, else of what outlives a step."""
        if self.memory_bytes:
            return self.memory_bytes
        states = [x for optimizer in self._optimizers for x in optimizer.state.values()]
        return {
            "parameters": _bytes(self._model.parameters()),
            "buffers": _bytes(self._model.buffers()),
            "gradients": self._gradient_bytes,
            "optimizer_state": _bytes(x for x in tree_leaves(states) if isinstance(x, Tensor)),
        }

    def close(self) -> None:
        """Stop looking."""
        self._stack.close()
        if self._recorder is not None:
            totals = self._recorder.step_memory().totals
            if totals["peak"] > self.memory_bytes.get("peak", 0):
                self.memory_bytes = totals
            self._recorder = None

    def _can_record(self) -> bool:
        reason = ""
        if len(self._optimizers) > 1:
            reason = "there are several optimizers"
        elif any(map(is_compiled, self._model.modules())):
            reason = "ops of compiled code are not seen"
        if reason:
            self.notes.append(f"activations were not counted: {reason}")
        return not reason

    def _record(self) -> None:
        recorder = MemoryRecorder(self._model, self._optimizers[0])
        recorder.begin(())
        self._stack.callback(recorder.end)
        self._stack.enter_context(recorder.following(self._model, listeners=[recorder]))
        for handle in recorder.gradient_hooks():
            self._stack.callback(handle.remove)
        self._stack.enter_context(recorder)
        self._recorder = recorder

    def _audit(self, optimizer: Optimizer) -> None:
        if len(self._optimizers) > 1:
            text = "no audit: several optimizers; call mprun.audit(model, optimizer) for each"
            self.notes = [*dict.fromkeys([*self.notes, text])]
            return
        try:
            self.audit = audit(self._model, optimizer, self._casts)
        except Exception as error:  # a look must never end a training
            self.notes.append(f"no audit: {first_line(error)}")


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages, each counted once."""
    storages = {storage_key(x): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
