"""A saved step, run again with every op watched.

    saved = read_step(Path("runs/bf16/nonfinite_step_37.pt"))
    print(replay(saved, model))     # `model` as the loop makes it; its weights are loaded

The model gets its weights, buffers, arguments, random numbers and autocast state of the step, goes
forward, and goes backward from the gradients that the loss sent into it. So the loss is not needed.
If the loss itself made the NaN, it is: then `step(model, batch)` has to give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mprun.integrations.saved_step import SavedCall, SavedStep
from mprun.integrations.step_capture import restore_random_states
from mprun.nested import all_tensors, map_tensors
from mprun.numerics.nonfinite.fp_exception import FpException
from mprun.numerics.nonfinite.step_monitor import StepMonitor
from mprun.numerics.tracker import StepListener

StepFunction = Callable[[nn.Module, Any], Any]
"""`step(model, batch)`: the loss of a micro-batch; None where it goes backward itself."""

MOST_KEYS = 3
STAYED_FINITE = (
    "the step stays finite here. What the file does not hold may have made the difference: another "
    "device or version, state outside of the model's parameters and buffers (a counter in Python)"
)


class MisfitError(ValueError):
    """The model is not the one that was saved; the text says how they differ."""


@dataclass(frozen=True)
class Replay:
    """The result of a replay; printed, it names the op."""

    step: int
    exceptions: tuple[FpException, ...]
    """Those that did harm, in the order they arose; the first one is the origin."""
    notes: tuple[str, ...]
    """What else is known."""

    @property
    def first(self) -> FpException | None:
        """The op that first made a NaN or an infinity; None if the step stays finite."""
        return self.exceptions[0] if self.exceptions else None

    def __str__(self) -> str:
        lines = [f"step {self.step}: {e.text()}" for e in self.exceptions]
        return "\n".join([*lines, *self.notes])


def replay(saved: SavedStep, model: nn.Module, step: StepFunction | None = None) -> Replay:
    """Run a saved step again.

    Args:
        saved: see `read_step`.
        model: of the same class; its weights and buffers are replaced. Its device is kept.
        step: goes forward and gives the loss, instead of the saved calls; it gets the batches that
            the loop noted (`run.note_batch`), else the first argument of each call.

    Raises:
        MisfitError: parameters or buffers differ in name or shape.
    """
    load(saved, model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    monitor = StepMonitor(model, [])
    watcher = monitor.watcher
    with watcher.following(model, listeners=[_Calls(monitor)]):
        monitor.begin_step(saved.step)
        for n, call in enumerate(saved.calls):
            restore_random_states(call.random, device)
            with _modes(model, call.evaluating):
                if step is None:
                    _repeat(saved, call, model, device, watcher)
                else:
                    _run(step, model, _moved(_batch(saved, n), device), watcher)
        monitor.check_gradients()
        outcome = monitor.end_step(skipped=False, loss_scale=None)
    model.zero_grad()
    return Replay(saved.step, tuple(outcome.of("finding")), tuple(_notes(saved, outcome, step)))


class _Calls(StepListener):
    def __init__(self, monitor: StepMonitor) -> None:
        self._monitor = monitor

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        self._monitor.inputs(inputs)

    def on_forward_end(self, path: str, outputs: Any) -> None:
        self._monitor.outputs(outputs)


def _repeat(
    saved: SavedStep,
    call: SavedCall,
    model: nn.Module,
    device: torch.device,
    watcher: AbstractContextManager[object],
) -> None:
    """One call, and the backward pass from the gradients of its outputs."""
    args, kwargs = _moved(call.args, device), _moved(call.kwargs, device)
    dtype = call.autocast or saved.autocast
    region: AbstractContextManager[object] = nullcontext()
    if dtype is not None:
        region = torch.autocast(device.type, getattr(torch, dtype))
    gradients = {n: x.to(device) for n, x in call.output_gradients.items()}
    with watcher:
        with region:
            outputs = all_tensors(model(*args, **kwargs))
        pairs = [(outputs[n], x) for n, x in gradients.items() if outputs[n].requires_grad]
        if pairs:
            torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])


def _run(
    step: StepFunction, model: nn.Module, batch: Any, watcher: AbstractContextManager[object]
) -> None:
    with watcher:
        loss = step(model, batch)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()


def _batch(saved: SavedStep, n: int) -> Any:
    if n < len(saved.batches):
        return saved.batches[n]
    call = saved.calls[n]
    return call.args[0] if len(call.args) == 1 and not call.kwargs else (call.args or call.kwargs)


def _moved(value: Any, device: torch.device) -> Any:
    return map_tensors(lambda x: x.to(device), value)


def load(saved: SavedStep, model: nn.Module) -> None:
    """Give a model the saved weights and buffers, in their saved dtypes.

    Raises:
        MisfitError: they differ in name or shape.
    """
    own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {**saved.parameters, **saved.buffers}
    reasons = [
        *_listed("the file has", kept.keys() - own.keys()),
        *_listed("the model has", own.keys() - kept.keys()),
        *_listed(
            "of another shape:", {n for n in kept.keys() & own if kept[n].shape != own[n].shape}
        ),
    ]
    if reasons:
        raise MisfitError(
            f"the model ({type(model).__name__}) is not the saved one ({saved.model}): "
            + "; ".join(reasons)
        )
    for name, value in kept.items():
        own[name].data = value.to(own[name].device)


def _listed(what: str, names: set[str]) -> Iterator[str]:
    if names:
        shown = ", ".join(sorted(names)[:MOST_KEYS])
        more = f" and {len(names) - MOST_KEYS} more" if len(names) > MOST_KEYS else ""
        yield f"{what} {shown}{more}"


@contextmanager
def _modes(model: nn.Module, evaluating: list[str]) -> Iterator[None]:
    """Inside, the modules of these names are not in training mode, all others are."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for name, module in model.named_modules():
            module.training = name not in evaluating
        yield
    finally:
        for module, training in before:
            module.training = training


def _notes(saved: SavedStep, outcome: Any, step: StepFunction | None) -> Iterator[str]:
    findings = outcome.of("finding")
    broken = any(not x.isfinite().all() for c in saved.calls for x in c.output_gradients.values())
    inside = any(e.phase == "forward" for e in findings)
    if step is None and broken and not inside:
        yield (
            "the gradient that the loss sent into the model is not finite: the loss made it. To "
            "name its op, replay with a function step(model, batch) that gives the loss"
        )
    elif not findings:
        yield STAYED_FINITE
    changed = [x for call in saved.calls for x in call.changed]
    if changed:
        yield f"changed in place after the call, so not as the model got it: {', '.join(changed)}"
    if saved.left_out:
        yield f"arguments that the file does not hold: {', '.join(saved.left_out)}"
    yield from _versions(saved.versions)


def _versions(saved: Mapping[str, str]) -> Iterator[str]:
    if saved.get("torch") != torch.__version__:
        yield f"saved with torch {saved.get('torch')}, replayed with {torch.__version__}"
