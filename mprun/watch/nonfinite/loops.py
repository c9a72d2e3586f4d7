"""The two entries to `StepMonitor`: any training loop, and mprun's run.

In any loop:

    with fp_exceptions(model, optimizer, action="halt") as report:
        for x, y in batches:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()

A step ends with the optimizer's; where a `torch.amp.GradScaler` skips that, with the next forward
pass of the model. With several optimizers, a step ends as soon as all of them have stepped. Where
they take turns, as in adversarial training, each turn is a step: it ends with the next forward pass
of the model or of a part of it, or when the same optimizer steps again.

mprun's loop does not know about exceptions. `Precision` is where its steps begin, go forward and
backward, and update. With `debug.fp_exceptions`, a `WatchedPrecision` takes its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.errors import RunFailedError
from mprun.precision import Precision, WrappedArithmetic
from mprun.precision._torch import in_backward, is_compiled
from mprun.watch.nonfinite.fp_exception import FpException, NonfiniteReport, finding_lines
from mprun.watch.nonfinite.nonfinite_watcher import COMPILED
from mprun.watch.nonfinite.step_monitor import HALT_AFTER, Response, Share, StepMonitor, StepOutcome
from mprun.watch.step_events import StepListener, plain_optimizers

logger = logging.getLogger("mprun")

OnStepEnd = Callable[[StepOutcome], None]

SLOW = "debug.fp_exceptions inspects every op of a training step: steps are not timed"


# ---- any loop ------------------------------------------------------------------------------------


class FpExceptionError(FloatingPointError):
    """A floating-point exception ended the loop; `exception` is the worst, `report` has all."""

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
        self, model: nn.Module, optimizer: Optimizer, on_step_end: OnStepEnd
    ) -> Sequence[str]:
        """Inspect this training from now on; returns notices for the user.

        Args:
            model, optimizer: what trains.
            on_step_end: called with the outcome of each inspected step.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Plain values for `load_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""


class WatchedRunExceptions(RunExceptions):
    """Inspects every op of every training step.

    Args:
        action, halt_after: as in `fp_exceptions`.
        share: gives the exceptions of all processes, which respond alike.
    """

    def __init__(self, action: str, halt_after: int, share: Share = tuple) -> None:
        super().__init__()
        self.response, self._share = Response(action, halt_after), share

    def precision(self, *args: Any, **kwargs: Any) -> Precision:
        return WatchedPrecision(self, *args, **kwargs)

    def attach(
        self, model: nn.Module, optimizer: Optimizer, on_step_end: OnStepEnd
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

    def step(self, optimizer: Optimizer) -> Tensor | None:
        """Take the step, judge it, and respond.

        Raises:
            RunFailedError: the response is to end the run.
        """
        scale = self.loss_scale.tensor
        factor = None if scale is None else float(scale)
        monitor, response = self._exceptions.monitor, self._exceptions.response
        monitor.check_gradients()
        skipped = super().step(optimizer)  # not watched: what it wrote is checked afterwards
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
