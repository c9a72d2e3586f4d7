"""Floating-point exceptions in mprun's own loop, which knows nothing of them.

What carries a policy out (`Precision`) is where a step begins, goes forward and backward, and
updates: one that looks meanwhile takes its place. Where nothing is looked for, it is the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun._torch import is_compiled
from mprun.errors import RunFailedError
from mprun.numerics.exceptions.found import Found, FpException
from mprun.numerics.exceptions.response import Response, snapshots
from mprun.numerics.exceptions.steps import Outcome, Steps
from mprun.numerics.exceptions.watch import COMPILED
from mprun.precision import (
    Arithmetic,
    Caster,
    Clip,
    LossScale,
    Policy,
    Precision,
    WrappedArithmetic,
)
from mprun.precision.update import ScaledOptimizer

SLOW = "every op of a training step is looked at (debug.fp_exceptions): steps are not timed"


class Exceptions(Protocol):
    """Whether and how a run looks for floating-point exceptions."""

    found: Found
    """What there was so far."""

    def precision(self, *args: Any, **kwargs: Any) -> Precision:
        """What carries a policy out; the arguments are those of `Precision`."""

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Sequence[str]:
        """These train from now on; what the user should know of it."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue."""


class NoExceptions:
    """Nothing is looked for, and nothing is different."""

    def __init__(self) -> None:
        self.found = Found()

    def precision(self, *args: Any, **kwargs: Any) -> Precision:
        return Precision(*args, **kwargs)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Sequence[str]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class FpExceptions:
    """Looks at every op of every training step.

    Args:
        action: log, halt or skip.
        halt_after: steps lost in a row that end halt and skip.
        saturates: whether 16-bit results clamped to the largest number count.
        tell: is called after each step with what it did, and those of its findings that are new.
    """

    def __init__(
        self,
        action: str,
        halt_after: int,
        saturates: bool,
        tell: Callable[[Outcome, Sequence[FpException]], None],
    ) -> None:
        self.found = Found()
        self._response = Response(action, halt_after)
        self._snapshot = snapshots(action)
        self._saturates = saturates
        self._tell = tell
        self._hooks = ExitStack()
        self._inside = False

    def precision(self, *args: Any, **kwargs: Any) -> Precision:
        return WatchedPrecision(self, *args, **kwargs)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Sequence[str]:
        self._model, self._optimizer = model, optimizer
        self._steps = Steps(model, [optimizer], self._saturates)
        compiled = any(map(is_compiled, model.modules()))
        return (SLOW, COMPILED) if compiled else (SLOW,)

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found.state_dict(), "in_a_row": self._response.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:  # the run was not looked at before
            self.found.load_state_dict(state["found"])
            self._response.in_a_row = state["in_a_row"]

    def begin(self, step: int, loss_scale: LossScale) -> None:
        """Step number `step` begins."""
        self._loss_scale, self._scale_before = loss_scale, loss_scale.state_dict()
        self._before = self._snapshot(self._model, self._optimizer)
        self._hooks.enter_context(self._steps.watch.following(self._model, self._optimizer))
        self._steps.begin(step)
        self._inside = True

    def region(self) -> AbstractContextManager[object]:
        """What runs in it is looked at, if it belongs to a training step."""
        return self._steps.watch.region() if self._inside else nullcontext()

    def inputs(self, given: Any) -> None:
        """What the model is called with, nested as it likes."""
        if self._inside:
            self._steps.inputs(given)

    def outputs(self, made: Any) -> None:
        """The model's output, nested as it likes."""
        if self._inside:
            self._steps.outputs(made)

    def update(
        self, optimizer: Optimizer, take: Callable[[Optimizer], Tensor | None]
    ) -> Tensor | None:
        """Take the step by `take`, judge it, and act; what `take` returns, or 1 for a dropped step.

        Raises:
            RunFailedError: going on is pointless.
        """
        scale = self._loss_scale.tensor
        factor = None if scale is None else float(scale)
        self._steps.gradients()
        # mprun's own optimizers run no ops but what makes their kernels: compiled ones stay so.
        seen = nullcontext() if isinstance(optimizer, ScaledOptimizer) else self.region()
        with seen:
            skipped = take(optimizer)
        by_scale = skipped is not None and bool(skipped) and self._loss_scale.kind == "dynamic"
        outcome = self._steps.finish(by_scale, factor)
        self._hooks.close()
        self._inside = False
        return self._answer(outcome, skipped)

    def _answer(self, outcome: Outcome, skipped: Tensor | None) -> Tensor | None:
        why = self._response.why_end(outcome)
        dropped = self._response.drops(outcome)
        if dropped:
            self._before.restore()
            self._loss_scale.load_state_dict(self._scale_before)
            self.found.dropped_steps += 1
        news = self.found.take(outcome.exceptions)
        self._tell(outcome, news if why is None else ())  # else the error says it
        if why is not None:
            raise RunFailedError(
                f"debug.fp_exceptions={self._response.action}: at step {outcome.step}: {why}; "
                "fp_exceptions.json in the run's folder has the details"
            )
        return torch.ones(()) if dropped else skipped


class WatchedPrecision(Precision):
    """A policy at work while its steps are looked at.

    Args:
        exceptions: looks at them.
        policy, caster, arithmetic, loss_scale, clip, layers: see `Precision`.
    """

    def __init__(
        self,
        exceptions: FpExceptions,
        policy: Policy,
        caster: Caster,
        arithmetic: Arithmetic,
        loss_scale: LossScale,
        clip: Clip,
        layers: Mapping[str, str] | None = None,
    ) -> None:
        watched = WrappedArithmetic(arithmetic, exceptions.region)
        super().__init__(policy, caster, watched, loss_scale, clip, layers)
        self._exceptions = exceptions

    def begin_step(self, step: int) -> None:
        self._exceptions.begin(step, self.loss_scale)
        super().begin_step(step)

    def forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._exceptions.inputs((args, kwargs))
        output = super().forward(model, *args, **kwargs)
        self._exceptions.outputs(output)
        return output

    def _scaled(self, loss: Tensor) -> Tensor:
        with self._exceptions.region():  # a scale can be too large for the loss itself
            return super()._scaled(loss)

    def step(self, optimizer: Optimizer) -> Tensor | None:
        return self._exceptions.update(optimizer, super().step)
