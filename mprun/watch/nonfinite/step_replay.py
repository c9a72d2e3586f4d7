"""A saved step, run again with every op inspected.

Weights, buffers and modes are loaded into the model. Each call is repeated with its own inputs,
random states and autocast. Two ways lead backward:

    from the outputs   the gradients that the loss sent into the model were saved: they start the
                       backward pass. If the loss made the NaN, its gradient is not finite, and the
                       report names the output that it arrived at.
    with `step`        a function that calls the model and computes the loss, as the loop did

An output may be computed from another one, as a loss from logits. Only the last outputs start the
backward pass; the gradient of an earlier one is put in its place when it is reached.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from mprun.precision import devices
from mprun.precision._torch import in_backward, outside_of_modes
from mprun.precision.nested import all_tensors, map_tensors
from mprun.records.console.formatting import listed
from mprun.watch.nonfinite.fp_exception import FpException, NonfiniteReport
from mprun.watch.nonfinite.saved_step import SavedCall, SavedStep, restore_random, unsaved_types
from mprun.watch.nonfinite.step_monitor import StepMonitor
from mprun.watch.step_events import StepListener

# `step(model, batch)`: runs the model on a batch and returns the loss, or goes backward itself
StepFunction = Callable[[nn.Module, Any], Any]

OF_LOSS = "the gradient that the loss sends"
NAMED = 3  # The number of names that a message lists before it counts the rest


class StepMisfitError(ValueError):
    """A saved step cannot be run with this model; the text is the reason."""


@dataclass(frozen=True)
class ReplayedStep:
    """What the replay of a step showed."""

    saved: SavedStep
    report: NonfiniteReport  # All exceptions
    cause: FpException | None  # The one that all began with; None if every number was finite
    notes: tuple[str, ...]  # How the replay differs from the step

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The result as text."""
        step = self.saved.step
        if self.cause is None:
            yield f"step {step}: every number is finite in the replay"
            yield from (f"possible reason: {reason}" for reason in self._why_finite())
        else:
            yield f"step {step}: {self.cause.text()}"
            yield from _tensor_lines(self.cause)
            others = len(self.report.findings) - 1
            if others:
                yield f"  and {others} more, maybe consequences"
            if "parameter" in self.cause.outputs[0].name and self.cause.kind == "outside":
                stepped = " or ".join(self.saved.optimizers) or "the optimizer"
                yield f"  the weight was bad before this step: {stepped} wrote it, or it was loaded"
        yield from (f"note: {note}" for note in self.notes)

    def _why_finite(self) -> Iterator[str]:
        saved = self.saved
        if not saved.batches and not any(any(c.output_grads) for c in saved.calls):
            yield "no gradient reached the model's outputs; give a script with step(model, batch)"
        yield (
            "a part of the step is not in the replay (a loss that reads the weights, a gradient "
            "hook, clipping): a script with step(model, batch) can run it"
        )
        yield "the model has a state outside of its parameters and buffers, such as a counter"
        yield f"the step ran on {saved.device} with torch {saved.versions.get('torch')}"


def replay(
    saved: SavedStep,
    model: nn.Module,
    step: StepFunction | None = None,
    device: torch.device | None = None,
) -> ReplayedStep:
    """Run a saved step again, and find the op that made a NaN or an infinity.

    The model is changed: it gets the weights, modes and gradients of the step, and its device. The
    random states of the process are changed too. `step` runs the model and the loss, from a batch
    that the loop gave, or else from what the model was called with; None: the calls are repeated as
    they were. Without a device it is where the step ran, or the CPU if there is no such device.

    Raises:
        StepMisfitError: the weights do not fit the model, or an input could not be saved.
        Exception: whatever the model or `step` raises.
    """
    device = device or _available(saved.device)
    _prepare(saved, model, device)
    repeated = RepeatedCalls(saved, model, device)
    repeated.monitor.begin_step(saved.step)
    watcher = repeated.monitor.watcher
    with (
        torch.enable_grad(),
        watcher.following(model, listeners=[repeated, repeated.monitor]),
        watcher,
    ):
        if step is None:
            repeated.by_themselves()
        else:
            repeated.inside(step)
        repeated.monitor.check_gradients()
        repeated.monitor.end_step(skipped=False, loss_scale=None)
    report = repeated.monitor.report
    notes = (*_differences(saved, device), *saved.notes, *repeated.notes)
    # the gradient of a loss that was not run counts only if nothing else was found
    of_model = [e for e in report.findings if not _is_of_loss(e)]
    cause = next(iter(of_model or report.findings), None)
    return ReplayedStep(saved, report, cause, tuple(dict.fromkeys(notes)))


class RepeatedCalls(StepListener):
    """The calls of a saved step, one after the other, on a model with its weights."""

    def __init__(self, saved: SavedStep, model: nn.Module, device: torch.device) -> None:
        self.monitor = StepMonitor(model, [])
        self.notes: list[str] = []
        self._saved, self._model, self._device = saved, model, device
        self._next = 0
        """The index of the next call."""

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        if path or in_backward() or not torch.is_grad_enabled():
            return
        if self._next < len(self._saved.calls):
            restore_random(self._saved.calls[self._next].random)
        self._next += 1

    def by_themselves(self) -> None:
        """Forward with the saved inputs, backward from the saved gradients."""
        for number, call in enumerate(self._saved.calls, start=1):
            args, kwargs = self._inputs_of(call)
            with autocast(call, self._saved, self._device):
                output = self._model(*args, **kwargs)
            self._backward(output, call, number)

    def inside(self, step: StepFunction) -> None:
        """Call `step` with each batch, and go backward from the loss that it returns."""
        for call, batch in self._batches():
            with autocast(call, self._saved, self._device):
                loss = step(self._model, batch)
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.sum().backward()

    def _batches(self) -> Iterator[tuple[SavedCall, Any]]:
        calls, batches = self._saved.calls, self._saved.batches
        if not batches:
            self.notes.append(
                "the loop gave no batch (run.note_batch(batch)): step got what the model was "
                "called with"
            )
            for call in calls:
                args, kwargs = self._inputs_of(call)
                # one argument by itself, named ones as a dictionary, several as a tuple
                every = [*args, kwargs] if kwargs or not args else args
                yield call, every[0] if len(every) == 1 else tuple(every)
        for i, batch in enumerate(batches):
            _refuse_unsaved(batch, "the batch")
            yield calls[min(i, len(calls) - 1)], map_tensors(lambda x: x.to(self._device), batch)

    def _inputs_of(self, call: SavedCall) -> tuple[list[Any], dict[str, Any]]:
        _refuse_unsaved([call.args, call.kwargs], "the model")
        needs_grad = iter(call.needs_grad)

        def moved(x: Tensor) -> Tensor:
            return x.to(self._device).requires_grad_(next(needs_grad, False))

        args, kwargs = map_tensors(moved, (call.args, call.kwargs))
        return args, kwargs

    def _backward(self, output: Any, call: SavedCall, number: int) -> None:
        outputs = [x for x in all_tensors(output) if x.requires_grad]
        if len(outputs) != len(call.output_grads):
            self.notes.append(
                f"call {number} has {len(outputs)} outputs that need gradients, the step had "
                f"{len(call.output_grads)}: its backward pass was left out"
            )
            return
        arrived: dict[Tensor, Tensor] = {}
        for i, (x, gradients) in enumerate(zip(outputs, call.output_grads, strict=True)):
            if gradients and all(g.shape == x.shape for g in gradients):
                with outside_of_modes():
                    total = sum(gradients[1:], gradients[0]).to(x.device, x.dtype)
                arrived[x] = total
                self.monitor.gradient_of_output(total, f"{OF_LOSS} to output {i} of call {number}")
        if arrived:
            go_backward(arrived)


def go_backward(arrived: dict[Tensor, Tensor]) -> None:
    """Go backward so that each output gets the whole gradient that arrived there in the step."""
    # The gradient saved for logits has the part of the loss that was computed from them: if both
    # started the backward pass, it would count twice
    below = _nodes_below([x.grad_fn for x in arrived if x.grad_fn is not None])
    last = [x for x in arrived if x.grad_fn not in below]
    with ExitStack() as stack:
        for x in arrived:
            if x.grad_fn in below:  # outputs that others are computed from
                stack.enter_context(x.register_hook(partial(_put_in_place, arrived[x])))
        torch.autograd.backward(last, [arrived[x] for x in last])


def _nodes_below(roots: Sequence[Node]) -> set[Node | None]:
    """The nodes of the graph that a backward pass from `roots` reaches after them."""
    seen: set[Node | None] = set()
    waiting = [node for root in roots for node, _ in root.next_functions]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def _put_in_place(saved: Tensor, g: Tensor) -> Tensor | None:
    with outside_of_modes():
        # NaN equals NaN. An equal gradient stays, as the watcher knows its origins
        same = bool(torch.isclose(g, saved, rtol=0, atol=0, equal_nan=True).all())
    return None if same else saved


@contextmanager
def autocast(call: SavedCall, saved: SavedStep, device: torch.device) -> Iterator[None]:
    """The autocast state of a call; of another device, where the replay runs on another one."""
    kind = torch.device(saved.device).type
    with ExitStack() as stack:
        for state in call.autocast:
            here = device.type if state.device == kind else state.device
            dtype, enabled = state.dtype, state.enabled
            if state.device == kind and not enabled and saved.autocast is not None:
                dtype, enabled = saved.autocast, True  # entered inside of the model's call
            stack.enter_context(torch.autocast(here, getattr(torch, dtype), enabled=enabled))
        yield


# ---- the model -----------------------------------------------------------------------------------


def _prepare(saved: SavedStep, model: nn.Module, device: torch.device) -> None:
    """Give the model the weights, buffers and modes of the step."""
    model.to(device)
    wanted = {**saved.parameters, **saved.buffers}
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if misfits := _misfits(wanted, own):
        raise StepMisfitError(
            f"the weights of the step ({saved.model}) do not fit this model "
            f"({type(model).__name__}): {'; '.join(misfits)}"
        )
    with torch.no_grad():
        for name, x in own.items():
            x.data = wanted[name].to(device)  # not `copy_`: the step may have another dtype
    for name, p in model.named_parameters():
        p.grad = None
        p.requires_grad_(name not in saved.frozen)
    for name, module in model.named_modules():
        module.training = name not in saved.in_evaluation


def _misfits(wanted: dict[str, Tensor], own: dict[str, Tensor]) -> list[str]:
    missing = [name for name in own if name not in wanted]
    unexpected = [name for name in wanted if name not in own]
    shapes = [
        f"{name} is {_size(x)} in the file, {_size(own[name])} in the model"
        for name, x in wanted.items()
        if name in own and own[name].shape != x.shape
    ]
    named = {"the file lacks ": missing, "the model has no ": unexpected, "": shapes}
    return [f"{what}{listed(names, NAMED)}" for what, names in named.items() if names]


def _size(x: Tensor) -> str:
    return " x ".join(map(str, x.shape)) or "one number"


# ---- the report ----------------------------------------------------------------------------------


def _is_of_loss(exception: FpException) -> bool:
    name = exception.outputs[0].name if exception.outputs else ""
    return exception.kind == "outside" and name.startswith(OF_LOSS)


def _tensor_lines(exception: FpException) -> Iterator[str]:
    if exception.kind == "outside":
        if _is_of_loss(exception):
            yield "  the model's own numbers are finite: the loss made it"
            yield "  to inspect the loss too, give recipe=... or a script with step(model, batch)"
        return
    for what, tensors in (("reads", exception.inputs), ("makes", exception.outputs)):
        for x in tensors:
            size = "x".join(map(str, x.shape)) or "scalar"
            finite = "" if x.low is None or x.high is None else f", {x.low:.4g} to {x.high:.4g}"
            bad = "".join(f", {n} {name}" for n, name in ((x.nan, "NaN"), (x.inf, "inf")) if n)
            yield f"  {what} {x.name}: {x.dtype} {size}{finite}{bad}"


def _differences(saved: SavedStep, device: torch.device) -> Iterator[str]:
    if torch.device(saved.device).type != device.type:
        yield f"the step ran on {saved.device}, the replay on {device}: other random numbers"
    here = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name, version in here.items():
        if (then := saved.versions.get(name)) not in (None, version):
            yield f"the step ran with {name} {then}, the replay with {version}"


def _available(name: str) -> torch.device:
    try:
        return devices.find(name)
    except ValueError:
        return devices.CPU


def _refuse_unsaved(value: Any, what: str) -> None:
    if kinds := unsaved_types(value):
        raise StepMisfitError(
            f"{what} had a {kinds[0]}, which could not be saved; give a script whose "
            "step(model, batch) makes it, and let the loop call run.note_batch(batch) with tensors"
        )
