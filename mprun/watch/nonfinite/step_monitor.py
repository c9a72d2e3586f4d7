"""The inspection of steps, their verdict, and the response to it: log, halt, or skip.

A step ends when all optimizers have stepped; where a `torch.amp.GradScaler` skips that, with the
next forward pass. Of optimizers that take turns, each turn is a step.

In mprun's loop, `Precision` is where steps begin, go forward and backward, and update. With
`debug.fp_exceptions`, a `WatchedPrecision` takes its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.errors import RunFailedError
from mprun.precision import Precision, WrappedArithmetic
from mprun.precision._torch import in_backward, is_compiled
from mprun.watch.nonfinite.fp_exception import FpException, NonfiniteReport, finding_lines
from mprun.watch.nonfinite.nonfinite_watcher import (
    COMPILED,
    NonfiniteWatcher,
    Origin,
    Origins,
    StateCheck,
    mark_reached,
)
from mprun.watch.op_watcher import is_finite, tensors_of, value_range
from mprun.watch.step_events import StepListener, plain_optimizers

logger = logging.getLogger("mprun")

SLOW = "debug.fp_exceptions inspects every op of a training step: steps are not timed"
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

    `watcher.following(..., listeners=[monitor])` gives it the model's inputs and outputs. The
    exceptions of all processes, as `share` gives them, are added to `report`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        response: Response | None = None,
        report: NonfiniteReport | None = None,
        share: Share = tuple,
    ) -> None:
        self.report, self._share = report or NonfiniteReport(), share
        self._model, self._optimizers = model, optimizers
        self._response = response or Response("log")
        self.watcher = NonfiniteWatcher(
            model, lambda x: self._state.name_of(x), self.check_gradients
        )
        """The mode to enter."""
        self._state = StateCheck(model, optimizers, self.watcher)
        self._step, self._checked_gradients = 0, False
        self._snapshot: Snapshot | None = None
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

        If it is not finite, the outputs are to blame, else the loss: then it is called `name`.
        """
        if is_finite(value_range(g)):
            return
        if self._of_outputs:
            self.watcher.spoil(g, self._of_outputs)
        else:
            self._state.label(g, name)

    def check_gradients(self) -> None:
        """The gradients exist; of one optimizer the first call counts, before they are unscaled."""
        if not self._checked_gradients or len(self._optimizers) > 1:
            self._checked_gradients = True
            self._state.check_gradients()

    def end_step(self, skipped: bool, loss_scale: float | None) -> StepOutcome:
        """The step ended, maybe skipped by a dynamic loss scale: judge it, undo what is dropped."""
        self._state.check_after_step()
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


# ---- any loop ------------------------------------------------------------------------------------


class FpExceptionError(FloatingPointError):
    """`except FpExceptionError`: one ended the loop; `exception` is the worst, `report` has all."""

    def __init__(self, text: str, exception: FpException | None, report: NonfiniteReport) -> None:
        super().__init__(text)
        self.exception = exception
        self.report = report


@contextmanager
def fp_exceptions(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    action: str = "log",
    halt_after: int = HALT_AFTER,
    first_step: int = 1,
) -> Iterator[NonfiniteReport]:
    """Inspect every op inside for NaN and infinities that are made of finite numbers.

        with mprun.numerics.fp_exceptions(model, optimizer, action="halt") as report:
            for x, y in batches:
                optimizer.zero_grad()
                loss_function(model(x), y).backward()
                optimizer.step()

    Args:
        model: the model, on its device and in its dtype.
        optimizer: its optimizer, or several; None where nothing is trained.
        action: log, report each distinct finding once (`logging`, "mprun"); halt, raise at the end
            of the first step with one; skip, restore model and optimizer to the state before it.
        halt_after: steps lost in a row, skipped by a loss scaler or dropped, that end halt and
            skip.
        first_step: the number of the first step inside, for the reports.

    Yields:
        The exceptions so far, to be read inside or afterwards.

    Raises:
        FpExceptionError: `action` says so.
        TypeError: `optimizer` is something else.
        ValueError: another action.
    """
    optimizers = plain_optimizers(optimizer)
    monitor = StepMonitor(model, optimizers, Response(action, halt_after))
    loop, watcher = _Loop(monitor, optimizers, first_step), monitor.watcher
    if any(map(is_compiled, model.modules())):
        logger.warning(COMPILED)
    # the loop first: it ends the last step before the monitor sees the inputs of the next one
    with watcher.following(model, *optimizers, listeners=[loop, monitor]), watcher:
        try:
            yield monitor.report
        except BaseException:
            loop.end_step(raises=False)  # the loop's own error is the one to show
            raise
        loop.end_step()


class _Loop(StepListener):
    """Knows where the steps of an inspected loop begin and end.

    `StepHooks` ends a step when each optimizer has stepped. Here optimizers may take turns.
    """

    def __init__(
        self, monitor: StepMonitor, optimizers: Sequence[Optimizer], first_step: int
    ) -> None:
        self.monitor = monitor
        self._optimizers = optimizers
        self._stepped: set[int] = set()
        """The optimizers that stepped in this step, by `id`."""
        self._skips = False
        self._loss_scale: float | None = None
        self._step = first_step
        monitor.begin_step(self._step)

    def on_forward_begin(self, path: str, inputs: tuple[Any, Any]) -> None:
        if in_backward():  # a recomputation
            return
        if self._stepped or self.monitor.watcher.scaler_overflowed:
            self.end_step()
        self.monitor.save()

    def on_update_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._stepped:  # its next turn
            self.end_step()
        self.monitor.save()
        self.monitor.check_gradients()
        # A scaler hands these to optimizers that unscale by themselves.
        scale, flag = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        self._loss_scale = None if scale is None else float(scale)
        self._skips |= flag is not None and bool(flag)  # nonzero: the optimizer will not step

    def on_update_end(self, optimizer: Optimizer) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self.end_step()

    def end_step(self, raises: bool = True) -> None:
        """The step is over, and the next one begins."""
        self.monitor.check_gradients()
        skipped = self._skips or self.monitor.watcher.scaler_overflowed
        outcome = self.monitor.end_step(skipped, self._loss_scale)
        self._skips, self._loss_scale = False, None
        self._stepped.clear()
        self._step += 1
        self.monitor.begin_step(self._step)
        if outcome.stop_reason is not None and raises:
            text = f"step {outcome.step}: {outcome.stop_reason}"
            worst = (*outcome.of("finding"), *outcome.of("expected"), None)[0]
            raise FpExceptionError(text, worst, self.monitor.report)
        for line in finding_lines(outcome.new_findings):
            logger.warning(line)


# ---- mprun's loop --------------------------------------------------------------------------------


class RunExceptions:
    """What a run does about floating-point exceptions: here nothing."""

    def __init__(self) -> None:
        self.report = NonfiniteReport()

    def precision(self, *args: Any, **kwargs: Any) -> Precision:
        """A `Precision`, from its arguments."""
        return Precision(*args, **kwargs)

    def attach(
        self, model: nn.Module, optimizer: Optimizer, on_step_end: Callable[[StepOutcome], None]
    ) -> Sequence[str]:
        """Inspect this training from now on, telling each step's outcome; returns notices."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Plain values for `load_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""


class WatchedRunExceptions(RunExceptions):
    """Inspects every op of every training step; `share` gives the exceptions of all processes."""

    def __init__(self, action: str, halt_after: int, share: Share = tuple) -> None:
        super().__init__()
        self.response, self._share = Response(action, halt_after), share

    def precision(self, *args: Any, **kwargs: Any) -> Precision:
        return WatchedPrecision(self, *args, **kwargs)

    def attach(
        self, model: nn.Module, optimizer: Optimizer, on_step_end: Callable[[StepOutcome], None]
    ) -> Sequence[str]:
        self.on_step_end = on_step_end
        self.monitor = StepMonitor(model, [optimizer], self.response, self.report, self._share)
        follow = self.monitor.watcher.following
        self.following = partial(follow, model, optimizer, listeners=[self.monitor])
        compiled = any(map(is_compiled, model.modules()))
        return (SLOW, COMPILED) if compiled else (SLOW,)

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.report.state_dict(), "in_a_row": self.response.lost_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # else the run was not inspected before
            self.report.load_state_dict(state["found"])
            self.response.lost_in_a_row = state["in_a_row"]


class WatchedPrecision(Precision):
    """A `Precision` whose steps `exceptions` inspects, from the arguments of `Precision`."""

    def __init__(self, exceptions: WatchedRunExceptions, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arithmetic = WrappedArithmetic(self.arithmetic, self._watched)
        self._exceptions = exceptions
        self._following = ExitStack()
        self._in_step = False

    def _watched(self) -> AbstractContextManager[object]:
        """Ops inside are inspected, if they belong to a training step."""
        return self._exceptions.monitor.watcher if self._in_step else nullcontext()

    def begin_step(self, step: int | None = None) -> None:
        step = self.steps + 1 if step is None else step
        self._scale_before = self.loss_scale.state_dict()
        self._following.enter_context(self._exceptions.following())
        self._exceptions.monitor.begin_step(step)
        self._exceptions.monitor.save()
        self._in_step = True
        super().begin_step(step)

    def _scaled(self, loss: Tensor) -> Tensor:
        with self._watched():  # a scale can be too large for the loss itself
            return super()._scaled(loss)

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Take the step, judge it, and respond.

        Raises:
            RunFailedError: the response is to end the run.
        """
        scale = self.loss_scale.tensor
        factor = None if scale is None else float(scale)
        monitor, response = self._exceptions.monitor, self._exceptions.response
        monitor.check_gradients()
        skipped = super().step(optimizer, closure)  # what it wrote is checked afterwards
        by_scale = skipped is not None and bool(skipped) and self.loss_scale.kind == "dynamic"
        outcome = monitor.end_step(by_scale, factor)
        self._following.close()
        self._in_step = False
        if outcome.dropped:  # a step that was undone counts for no growth of the scale
            self.loss_scale.load_state_dict(self._scale_before)
        self._exceptions.on_step_end(outcome)
        if outcome.stop_reason is not None:
            raise RunFailedError(
                f"debug.fp_exceptions={response.action}: at step {outcome.step}: "
                f"{outcome.stop_reason}; fp_exceptions.json in the run's folder has the details"
            )
        return torch.ones(()) if outcome.dropped else skipped
