"""The inspection of a step, its verdict, and the response to it: log, halt, or skip.

Ops are inspected as they run (`NonfiniteWatcher`), those of the optimizer excepted: optimizers with
kernels of their own write to parameters unseen. So what outlasts a step (gradients, parameters,
buffers, optimizer state) is checked after it: a parameter that was finite before, with finite
gradients, names the optimizer. What is not finite from the start (a mask in a buffer) is not
reported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision._torch import in_backward
from mprun.precision.policy import dtype_name
from mprun.watch.nonfinite.fp_exception import UNSEEN, FpException, NonfiniteReport
from mprun.watch.nonfinite.nonfinite_watcher import (
    NonfiniteWatcher,
    Origin,
    Origins,
    kind_of,
    mark_reached,
    memory_key,
)
from mprun.watch.nonfinite.op_call import is_finite, stats, value_range
from mprun.watch.op_watcher import tensors_of
from mprun.watch.step_events import StepListener


class StateTensor(NamedTuple):
    """A tensor that outlasts a step."""

    label: str  # Its name in reports: `parameter fc1.weight`, `exp_avg of fc1.weight`
    owner: str  # The name of its parameter, or its own
    tensor: Tensor


class StateCheck:
    """Checks the tensors of a model and its optimizers that outlast a step.

    Args:
        model, optimizers: the model, and its optimizers if it is trained.
        watcher: knows the origins, and receives new ones.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        watcher: NonfiniteWatcher,
    ) -> None:
        self._model, self._optimizers, self._watcher = model, optimizers, watcher
        self._inputs: list[weakref.ref[Tensor]] = []  # weak: batches are the loop's
        self._labels: list[tuple[Tensor, str]] = []
        self._of_gradients: dict[str, Origins] = {}
        """Parameter to the origins of its gradient, if that is not finite in this step."""
        self._bad = {x.label for x in self._items() if not is_finite(value_range(x.tensor))}

    def begin_step(self) -> None:
        """A step begins."""
        for of_step in (self._of_gradients, self._inputs, self._labels):
            of_step.clear()

    def label(self, x: Tensor, name: str) -> None:
        """Call a tensor `name` in this step's reports; it stays in memory until the next step."""
        self._labels.append((x, name))

    def inputs(self, tensors: Iterable[Tensor]) -> None:
        """The model is called with these."""
        self._inputs += map(weakref.ref, tensors)

    def name_of(self, x: Tensor) -> str | None:
        """The name of a tensor: parameter, buffer, gradient, the model's input."""
        key = memory_key(x)
        named = [(item.tensor, item.label) for item in (*self._items(), *self._gradients())]
        named += [(given, "the model's input") for given in self._live_inputs()]
        return next((name for x, name in (*self._labels, *named) if memory_key(x) == key), None)

    def check_gradients(self, step: int) -> None:
        """Check the gradients before they are unscaled, clipped or used."""
        for item in self._gradients():
            if is_finite(measured := value_range(item.tensor)):
                continue
            origins = self._watcher.origins_of(item.tensor)
            origins = origins or self._unseen(step, item, "backward", kind_of(measured))
            mark_reached(origins, item.label)
            self._of_gradients[item.owner] = origins

    def check_after_step(self, step: int) -> None:
        """Check the tensors that the step wrote; those that were bad before are not reported."""
        bad = set()
        by_optimizer: dict[str, Origins] = {}
        for item in self._items():
            if is_finite(measured := value_range(item.tensor)):
                continue
            bad.add(item.label)
            if item.label not in self._bad:  # else reported by an earlier step, or a mask
                # what spoiled a parameter spoils its state
                origins = self._origins_of(item) or by_optimizer.get(item.owner)
                origins = origins or self._by_optimizer(step, item, kind_of(measured))
                by_optimizer[item.owner] = origins
                self._add_bad(item, origins)
        self._bad = bad

    def _origins_of(self, item: StateTensor) -> Origins:
        """Of a tensor that the step spoiled: its own, its gradient's, or those of any gradient.

        Clipping divides by the norm of all gradients, and so spoils each of them.
        """
        own = self._watcher.origins_of(item.tensor) or self._of_gradients.get(item.owner)
        return own or frozenset[Origin]().union(*self._of_gradients.values())

    def _add_bad(self, item: StateTensor, origins: Origins) -> None:
        self._watcher.spoil(item.tensor, origins)
        mark_reached(origins, item.label)
        for origin in origins:
            origin.lasts = True

    def _by_optimizer(self, step: int, item: StateTensor, kind: str) -> Origins:
        """The origin of numbers that an optimizer wrote, although the gradients are finite."""
        owner = dict(self._parameters()).get(item.owner)
        held = [row for row in self._groups() if row[1] is owner]
        optimizer = held[0][0] if held else next(iter(self._optimizers), None)
        reason = next((text for row in held if (text := _eps_reason(*row))), None)
        if reason is not None and kind == "overflow":
            kind = "infinite"  # a division by 0, in any precision
        return self._unseen(step, item, "optimizer", kind, optimizer, reason)

    def _unseen(
        self,
        step: int,
        item: StateTensor,
        phase: str,
        kind: str,
        optimizer: Optimizer | None = None,
        reason: str | None = None,
    ) -> Origins:
        """The origin of numbers that no op of PyTorch wrote where it was watched."""
        of_owner = [x for x in self._items() if x.owner == item.owner and x.label != item.label]
        gradients = [g for g in self._gradients() if g.owner == item.owner and phase != "backward"]
        module = item.owner.rpartition(".")[0]
        exception = FpException(
            verdict="absorbed",
            kind=kind,
            step=step,
            last_step=step,
            op=UNSEEN if phase == "backward" else f"{type(optimizer).__name__}.step",
            phase=phase,
            module=module,
            module_kind=self._watcher.kinds.get(module, ""),
            location=None,
            inputs=tuple(stats(x.label, x.tensor) for x in gradients),
            outputs=tuple(stats(x.label, x.tensor) for x in (item, *of_owner)),
            reason=reason,
        )
        return frozenset({self._watcher.add(exception)})

    def _groups(self) -> Iterator[tuple[Optimizer, Tensor, dict[str, Any]]]:
        """Each parameter that is trained, with its optimizer and group."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from ((optimizer, p, group) for p in group["params"])

    def _gradients(self) -> Iterator[StateTensor]:
        for name, p in self._parameters():
            if p.grad is not None:
                yield StateTensor(f"gradient of {name}", name, p.grad)
        for x in self._live_inputs():
            if x.is_leaf and x.grad is not None:
                yield StateTensor("gradient of the model's input", "", x.grad)

    def _live_inputs(self) -> Iterator[Tensor]:
        """The model's inputs in this step that are still alive."""
        yield from (x for ref in self._inputs if (x := ref()) is not None)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the model, and those that only the optimizers have."""
        named: dict[str, Any] = dict(self._model.named_parameters())
        yield from named.items()
        known = {id(p) for p in named.values()}
        for g, group in enumerate(g for x in self._optimizers for g in x.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in known:
                    yield f"parameter {i} of group {g}", p

    def _items(self) -> Iterator[StateTensor]:
        for name, p in self._parameters():
            yield StateTensor(f"parameter {name}", name, p)
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        yield StateTensor(f"{key} of {name}", name, value)
        for name, buffer in self._model.named_buffers():
            yield StateTensor(f"buffer {name}", name, buffer)


def _eps_reason(optimizer: Optimizer, p: Tensor, group: dict[str, Any]) -> str | None:
    """Why an optimizer divided by 0: a moment is 0, and its `eps` is 0 in the parameter's dtype."""
    eps = group.get("eps")
    if not isinstance(eps, float) or not eps > 0 == float(torch.tensor(eps, dtype=p.dtype)):
        return None
    # A quotient by sqrt(moment) + eps, of which both are 0
    bad = ~torch.isfinite(p.detach())
    state = optimizer.state.get(p, {}).values()
    moments = [x for x in state if isinstance(x, Tensor) and x.shape == p.shape]
    if not any(bool((bad & (x == 0)).any()) for x in moments):
        return None
    return f"the optimizer's eps={eps:g} is 0 in {dtype_name(p.dtype)}"


OUTPUT = "the model's output"
REACHED = 50  # How many of the tensors that an exception spoiled are named
ACTIONS = ("log", "halt", "skip")
# Steps lost in a row after which `halt` and `skip` give up: a dynamic loss scale of 65536 is 1/16
# by then, and no gradient needs one below 1
HALT_AFTER = 20


# Exceptions of this process to those of all
Share = Callable[[Iterable[FpException]], tuple[FpException, ...]]


@dataclass(frozen=True)
class StepOutcome:
    """The exceptions of a step, and the response to them."""

    step: int
    skipped: bool  # Whether dynamic loss scaling skipped it
    exceptions: tuple[FpException, ...]  # In the order they occurred, each with its verdict
    new_findings: tuple[FpException, ...] = ()
    """Those that are findings, and the first of their kind."""
    dropped: bool = False  # Whether model and optimizer are as they were before the step
    stop_reason: str | None = None  # Why training should end; None where it should continue

    def of(self, verdict: str) -> list[FpException]:
        """The exceptions of a verdict."""
        return [e for e in self.exceptions if e.verdict == verdict]


class Response:
    """Decides after each step what to do.

    Args:
        action: one of `ACTIONS`.
        halt_after: the number of lost steps in a row, skipped or dropped, that ends halt and skip.

    Raises:
        ValueError: another action, or no positive number.
    """

    def __init__(self, action: str, halt_after: int = HALT_AFTER) -> None:
        if action not in ACTIONS:
            raise ValueError(f"action={action!r}; legal: {', '.join(ACTIONS)}")
        if halt_after < 1:
            raise ValueError(f"halt_after={halt_after}; legal is 1 or more")
        self.action = action
        self.lost_in_a_row = 0
        self._halt_after = halt_after

    def to(self, outcome: StepOutcome) -> StepOutcome:
        """The outcome with `dropped` and `stop_reason`; call it once a step."""
        findings = outcome.of("finding")
        dropped = self.action == "skip" and bool(findings)
        self.lost_in_a_row = self.lost_in_a_row + 1 if dropped or outcome.skipped else 0
        reason = None
        if self.action == "halt" and findings:
            reason = findings[0].text()
        elif self.action != "log" and self.lost_in_a_row >= self._halt_after:
            causes = (*findings, *outcome.of("expected"))
            last = causes[0].text() if causes else "of unknown origin"
            lost = "had exceptions and were dropped" if dropped else "overflowed and were skipped"
            reason = f"{self.lost_in_a_row} steps in a row {lost}; the last one: {last}"
        return replace(outcome, dropped=dropped, stop_reason=reason)


class StepMonitor(StepListener):
    """Inspects one step after another, and responds.

    `watcher.following(..., listeners=[monitor])` gives it the model's inputs and outputs.

    Args:
        model, optimizers: the model, and its optimizers if it is trained.
        response: decides; None to log.
        report: the exceptions are added to it.
        share: gives the exceptions of all processes, from those of this one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        response: Response | None = None,
        report: NonfiniteReport | None = None,
        share: Share = tuple,
    ) -> None:
        self.report = report or NonfiniteReport()
        self._share = share
        self._model, self._optimizers = model, optimizers
        self._response = response or Response("log")
        self.watcher = NonfiniteWatcher(
            model, lambda x: self._state.name_of(x), self.check_gradients
        )
        """The mode to enter."""
        self._state = StateCheck(model, optimizers, self.watcher)
        self._step = 0
        self._snapshot: Snapshot | None = None
        self._checked_gradients = False
        self._of_outputs: Origins = frozenset()
        """The origins of this step's outputs of the model that are not finite."""

    def begin_step(self, step: int) -> None:
        """Step number `step` begins."""
        self._step, self._checked_gradients, self._snapshot = step, False, None
        self._of_outputs = frozenset()
        self._state.begin_step()
        self.watcher.begin_step(step)

    def save(self) -> None:
        """Copy model and optimizers, for `skip`; the first call in a step counts."""
        if self._response.action == "skip" and self._snapshot is None:
            with self.watcher.muted():
                self._snapshot = Snapshot(self._model, *self._optimizers)

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        if not path and not in_backward():  # of a part, or a recomputation
            self._state.inputs(tensors_of(inputs))

    def on_forward_end(self, path: str, outputs: Any) -> None:
        if path or in_backward():
            return
        for x in tensors_of(outputs):
            if not is_finite(value_range(x)):
                origins = self.watcher.origins_of(x)
                mark_reached(origins, OUTPUT)
                self._of_outputs |= origins

    def gradient_of_output(self, g: Tensor, name: str) -> None:
        """A gradient that a loss, which was not inspected, computed from the model's outputs.

        If it is not finite, it is because of the outputs, else because of the loss.

        Args:
            g: the gradient.
            name: what reports call it if the loss is to blame.
        """
        if is_finite(value_range(g)):
            return
        if self._of_outputs:
            self.watcher.spoil(g, self._of_outputs)
        else:
            self._state.label(g, name)

    def check_gradients(self) -> None:
        """The gradients exist; the first call counts, before they are unscaled.

        With several optimizers each may have a backward pass of its own before it: each call
        counts.
        """
        if not self._checked_gradients or len(self._optimizers) > 1:
            self._checked_gradients = True
            self._state.check_gradients(self._step)

    def end_step(self, skipped: bool, loss_scale: float | None) -> StepOutcome:
        """The step ended: judge it, and restore what `skip` drops.

        Args:
            skipped: whether dynamic loss scaling skipped it.
            loss_scale: the factor of its loss; None without one, or if a scaler has it.
        """
        self._state.check_after_step(self._step)
        scale = loss_scale or self.watcher.loss_scale
        judged = [_judged(origin, skipped, scale) for origin in self.watcher.origins]
        exceptions = self._share(e for e in judged if e is not None)
        outcome = self._response.to(StepOutcome(self._step, skipped, exceptions))
        if outcome.dropped and self._snapshot is not None:
            with self.watcher.muted():
                self._snapshot.restore()
            self.report.dropped_steps += 1
        return replace(outcome, new_findings=self.report.add_step(exceptions))


def _judged(origin: Origin, skipped: bool, loss_scale: float | None) -> FpException | None:
    """The exception with its verdict; None for a constant that reached no result."""
    # Minus infinity in logits (actions that are not allowed) is meant: the loss must be reached
    reached = [what for what in origin.reached if not (origin.deliberate and what == OUTPUT)]
    if origin.deliberate and not reached:
        return None
    has_effect = reached or origin.divided_by
    undone = skipped and not origin.lasts and _by_loss_scale(origin.exception, loss_scale)
    return replace(
        origin.exception,
        verdict="absorbed" if not has_effect else "expected" if undone else "finding",
        reached=tuple(islice(origin.reached, REACHED)),
        reached_count=len(origin.reached),
        loss_scale=loss_scale,
        divided_by=origin.divided_by,
    )


def _by_loss_scale(exception: FpException, loss_scale: float | None) -> bool:
    """Whether a loss scale can have caused it: the scaled loss or its backward pass overflowed.

    A NaN or an infinity that float64 has as well appears with any scale.
    """
    overflow = exception.kind == "overflow"
    if exception.phase == "backward":
        # Of a kernel that cannot be run again it is not known what float64 has.
        unknown = exception.kind in ("invalid", "infinite") and exception.in_float64 is None
        return overflow or unknown
    if loss_scale is None or not overflow or exception.phase != "other":
        return False
    # Scaling the loss multiplies by one number. It may be known by its float32 inverse alone, so to
    # about 1e-7
    factors = (x.high for x in exception.inputs if x.low == x.high and x.high is not None)
    return exception.op == "mul" and any(isclose(x, loss_scale, rel_tol=1e-6) for x in factors)


class Snapshot:
    """A copy of a model's tensors and of its optimizers' state and options."""

    def __init__(self, model: nn.Module, *optimizers: Optimizer) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._options = [(g, {k: v for k, v in g.items() if k != "params"}) for g in groups]
        self._states = [
            (optimizer.state, {p: dict(entries) for p, entries in optimizer.state.items()})
            for optimizer in optimizers
        ]
        trained = (p for group in groups for p in group["params"])
        states = (x for _, state in self._states for e in state.values() for x in e.values())
        every = (*model.parameters(), *model.buffers(), *trained, *tensors_of(list(states)))
        self._tensors = [(x, x.detach().clone()) for x in dict.fromkeys(every)]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back, into the same tensors: others may refer to them."""
        for tensor, saved in self._tensors:
            tensor.copy_(saved)
        for group, options in self._options:
            group.update(options)
        for state, entries_of in self._states:
            state.clear()
            state.update({p: dict(entries) for p, entries in entries_of.items()})
