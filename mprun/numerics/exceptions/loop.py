"""Floating-point exceptions in a loop of one's own.

    with fp_exceptions(model, optimizer, action="halt") as found:
        for x, y in batches:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()

A step ends with the optimizer's; where a `torch.amp.GradScaler` skips that, with the next forward
pass of the model. Of several optimizers, a step ends as soon as all of them have stepped. Where
they take turns, as in adversarial training, each turn is a step: it ends with the next forward pass
of the model or of a part of it, or when the same optimizer steps again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mprun._torch import in_backward, is_compiled
from mprun.numerics.exceptions.found import Found, FpException, told
from mprun.numerics.exceptions.response import (
    HALT_AFTER,
    NoSnapshot,
    Response,
    Snapshot,
    snapshots,
)
from mprun.numerics.exceptions.steps import Steps
from mprun.numerics.exceptions.watch import COMPILED

logger = logging.getLogger("mprun")


class FpExceptionError(FloatingPointError):
    """A floating-point exception ended the loop; `exception` tells which, `found` all of them."""

    def __init__(self, text: str, exception: FpException | None, found: Found) -> None:
        super().__init__(text)
        self.exception = exception
        self.found = found


@contextmanager
def fp_exceptions(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    action: str = "log",
    halt_after: int = HALT_AFTER,
    saturates: bool = False,
) -> Iterator[Found]:
    """Look at every op inside for NaN and infinities that are made of finite numbers.

    Args:
        model: the model, on its device and in its dtype.
        optimizer: its optimizer, or several; None where nothing is trained.
        action: log, tell each distinct finding once (`logging`, "mprun"); halt, raise at the end of
            the first step with one; skip, put model and optimizer back to where they were before.
        halt_after: steps lost in a row, skipped by a loss scaler or dropped, that end halt and
            skip.
        saturates: whether 16-bit results that were clamped to the largest number count as well.

    Yields:
        What was found so far, to be read inside or afterwards.

    Raises:
        FpExceptionError: `action` says so.
        TypeError: `optimizer` is something else.
        ValueError: another action.
    """
    loop = _Loop(model, _optimizers(optimizer), Response(action, halt_after), saturates)
    if any(map(is_compiled, model.modules())):
        logger.warning(COMPILED)
    with loop.hooks(), loop.steps.watch:
        try:
            yield loop.found
        except BaseException:
            loop.close(raises=False)
            raise
        loop.close()


def _optimizers(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """The optimizers, each once, in order."""
    if given is None or isinstance(given, Optimizer):
        return [] if given is None else [given]
    every = list(given) if isinstance(given, Iterable) else [given]
    for x in every:
        if not isinstance(x, Optimizer):
            raise TypeError(
                f"optimizer holds {type(x).__name__}; legal: an optimizer, several, or None"
            )
    return list(dict.fromkeys(every))


class _Loop:
    """Knows from hooks where steps begin and end."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        response: Response,
        saturates: bool,
    ) -> None:
        self.found = Found()
        self.steps = Steps(model, optimizers, saturates)
        self._model, self._optimizers = model, optimizers
        self._stepped: set[int] = set()
        """The optimizers that stepped in this step, by `id`."""
        self._response = response
        self._snapshot = snapshots(response.action)
        self._before: Snapshot | NoSnapshot | None = None
        self._skips = False
        self._loss_scale: float | None = None
        self._step = 1
        self.steps.begin(self._step)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Notice forward passes and steps."""
        with ExitStack() as stack:
            model = self._model
            stack.enter_context(self.steps.watch.following(model, *self._optimizers))
            handles = [
                *(
                    m.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
                    for m in model.modules()
                ),
                model.register_forward_hook(self._forward_ended),
            ]
            for optimizer in self._optimizers:
                handles.append(optimizer.register_step_pre_hook(self._update_begins))
                handles.append(optimizer.register_step_post_hook(self._update_ended))
            for handle in handles:
                stack.callback(handle.remove)
            yield

    def _forward_begins(self, module: nn.Module, args: object, kwargs: object) -> None:
        if in_backward():  # code that is run again
            return
        if self._stepped or self.steps.watch.scaler_overflowed:
            self.close()
        if module is self._model:
            self.steps.inputs((args, kwargs))
        self._remember()

    def _remember(self) -> None:
        if self._before is None:
            self._before = self._snapshot(self._model, *self._optimizers)

    def _forward_ended(self, module: nn.Module, args: object, made: Any) -> None:
        self.steps.outputs(made)

    def _update_begins(self, optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) in self._stepped:
            self.close()
        self._remember()
        self.steps.gradients()
        # Optimizers that unscale by themselves are told so.
        scale, flag = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        self._loss_scale = None if scale is None else float(scale)
        self._skips |= flag is not None and bool(flag)

    def _update_ended(self, optimizer: Optimizer, *_: object) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self.close()

    def close(self, raises: bool = True) -> None:
        """The step is over, and the next one begins."""
        skipped = self._skips or self.steps.watch.scaler_overflowed
        self.steps.gradients()
        outcome = self.steps.finish(skipped, self._loss_scale)
        news = self.found.take(outcome.exceptions)
        why = self._response.why_end(outcome)
        if self._response.drops(outcome) and self._before is not None:
            self._before.restore()
            self.found.dropped_steps += 1
        self._before, self._skips, self._loss_scale = None, False, None
        self._stepped.clear()
        self._step += 1
        self.steps.begin(self._step)
        if why is not None and raises:
            worst = (*outcome.of("finding"), *outcome.of("expected"), None)
            raise FpExceptionError(f"step {outcome.step}: {why}", worst[0], self.found)
        for line in told(news):
            logger.warning(line)
