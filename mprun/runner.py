"""The training loop, and nothing else.

It knows no precision mode, no file and no terminal: a `Precision` says how to go forward, backward
and step, a `Clock` times the step, an `Observer` is told what happened. Losses stay on the device
and are read a fraction of a second late, in one go, so that logging every step costs a CUDA run no
synchronization.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mprun.data import Batch, Batches, Order
from mprun.errors import RunFailedError
from mprun.precision import Precision
from mprun.readings import Reading, Readings, readings_for
from mprun.recipe import Recipe
from mprun.record import Epoch, Scores
from mprun.schedule import Schedule
from mprun.timing import Clock

FLUSH_EVERY_S = 0.25
"""How late losses are read and lines written, at most, while steps are short."""


NO_SCORES: Scores = {"loss": None, "accuracy": None}


class StopRequestedError(Exception):
    """The user or the system asked the run to end; it ended between two steps."""


@dataclass(frozen=True)
class Limits:
    """When training ends: at whichever comes first; None is no limit."""

    epochs: int | None
    max_steps: int | None
    max_time_s: float | None

    def planned_steps(self, steps_per_epoch: int) -> int | None:
        """Optimizer steps if time does not run out, or None where only time ends the run."""
        by_epochs = None if self.epochs is None else self.epochs * steps_per_epoch
        known = [n for n in (by_epochs, self.max_steps) if n is not None]
        return min(known) if known else None


class StepLine(NamedTuple):
    """What is known of one optimizer step."""

    step: int
    epoch: int
    loss: float
    lr: float
    loss_scale: float
    skipped: bool
    step_time_ms: float
    data_time_ms: float
    timed: bool
    """Whether it enters the statistics: a full-size batch."""


class Observer(Protocol):
    """Is told what happens, in order."""

    def steps(self, lines: list[StepLine]) -> None:
        """Steps that were taken since the last call."""

    def epoch(self, epoch: Epoch) -> None:
        """An epoch ended and was validated."""


class NoObserver:
    """Tells nobody."""

    def steps(self, lines: list[StepLine]) -> None:
        pass

    def epoch(self, epoch: Epoch) -> None:
        pass


@dataclass
class Parts:
    """What the loop runs on."""

    recipe: Recipe
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Schedule
    precision: Precision
    train: Batches
    order: Order
    validation: Batches
    test: Batches
    micro_batch: int
    """Samples per forward pass; a batch of `train` is cut into pieces of this size."""
    clock: Clock
    readings: Readings


class _Pending(NamedTuple):
    """A step whose loss is not read yet."""

    step: int
    epoch: int
    size: int
    lr: float
    data_time_ms: float


class Trainer:
    """Trains, validates and tests; keeps where it is.

    Args:
        parts: model, optimizer, data and the rest.
        limits: when to end.
        observer: who is told.
        stop: asked between steps whether to end at once.
    """

    def __init__(
        self, parts: Parts, limits: Limits, observer: Observer, stop: Callable[[], bool]
    ) -> None:
        self.parts = parts
        self.step = 0
        self.epoch = 0
        self.limit(limits)
        self._observer = observer
        self._stop = stop
        self._pending: list[_Pending] = []
        self._flushed_at = 0.0
        self._deadline = math.inf
        self._sums = _Sums()
        self._last_scores = NO_SCORES
        self._batches_done = 0
        self._order_state = parts.order.state()

    def limit(self, limits: Limits) -> None:
        """Set when the next `fit` ends."""
        self._limits = limits
        self._planned = limits.planned_steps(len(self.parts.train))

    def fit(self) -> None:
        """Train until a limit, validating after each epoch.

        Raises:
            StopRequestedError: `stop` said so; everything up to the last step was reported.
            RunFailedError: the loss became NaN or infinite.
        """
        self._flushed_at = time.perf_counter()
        if self._limits.max_time_s is not None:
            self._deadline = self._flushed_at + self._limits.max_time_s
        while not self._finished():
            self.epoch += 1
            self._train_epoch()
            if len(self.parts.validation.data):
                self._flush()
                self.parts.clock.pause()
                self._observer.epoch(self._close_epoch(self.evaluate(self.parts.validation)))
        self._flush()
        if self._sums.epoch:
            self._observer.epoch(self._close_epoch(NO_SCORES))

    def train_scores(self) -> Scores:
        """Means over the samples of the current epoch so far, or of the one that just ended."""
        return self._sums.scores() if self._sums.epoch else self._last_scores

    def state_dict(self) -> dict[str, Any]:
        """Everything the loop needs to go on exactly where it is, between two steps."""
        parts = self.parts
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batches_done": self._batches_done,
            "sums": self._sums.state_dict(),
            "order": self._order_state,
            "model": parts.model.state_dict(),
            "optimizer": parts.optimizer.state_dict(),
            "scheduler": parts.scheduler.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }

    def _finished(self) -> bool:
        done = self._planned is not None and self.step >= self._planned
        return done or time.perf_counter() >= self._deadline

    def _train_epoch(self) -> None:
        parts, clock = self.parts, self.parts.clock
        parts.model.train()
        self._order_state, self._batches_done = parts.order.state(), 0
        batches = parts.train.epoch(parts.order.draw())
        asked_at = time.perf_counter()
        while (batch := next(batches, None)) is not None:
            ready_at = time.perf_counter()
            lr = parts.optimizer.param_groups[0]["lr"]
            clock.start()
            loss, outputs = self.optimizer_step(batch)
            clock.stop()
            self.step += 1
            self._batches_done += 1
            parts.readings.put(loss, self._correct(outputs, batch.targets))
            waited_ms = (ready_at - asked_at) * 1e3
            self._pending.append(_Pending(self.step, self.epoch, batch.size, lr, waited_ms))
            late_s = time.perf_counter() - self._flushed_at
            if late_s > FLUSH_EVERY_S or parts.readings.full:
                self._flush()
            if self._stop():
                self._flush()
                raise StopRequestedError
            if self._finished():
                return
            asked_at = time.perf_counter()

    def optimizer_step(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """One optimizer step; the batch's mean loss and the outputs of its micro-batches."""
        parts, losses, outputs = self.parts, [], []
        parts.optimizer.zero_grad()
        for x, y in self._micro_batches(batch):
            output = parts.precision.forward(parts.model, x)
            loss = parts.recipe.loss(output, y)
            if len(y) != batch.size:  # a micro-batch counts by its share of the samples
                loss = loss * (len(y) / batch.size)
            parts.precision.backward(loss)
            losses.append(loss.detach())
            outputs.append(output.detach())
        parts.precision.step(parts.optimizer)
        parts.scheduler.step()
        return (losses[0] if len(losses) == 1 else torch.stack(losses).sum()), outputs

    def _micro_batches(self, batch: Batch) -> Iterable[tuple[Tensor, Tensor]]:
        size = self.parts.micro_batch
        if batch.size <= size:
            return ((batch.inputs, batch.targets),)
        return zip(batch.inputs.split(size), batch.targets.split(size), strict=True)

    def _correct(self, outputs: list[Tensor], targets: Tensor) -> Tensor | None:
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.parts.recipe.correct(output, targets)

    def _flush(self) -> None:
        """Read the pending losses off the device, report the steps, stop at a broken loss."""
        pending, self._pending = self._pending, []
        self._flushed_at = time.perf_counter()
        if not pending:
            return
        readings, times = self.parts.readings.take(), self.parts.clock.take()
        full, scale = self.parts.train.batch_size, self.parts.precision.loss_scale.value
        lines, closed = [], []
        for p, (loss, correct), ms in zip(pending, readings, times, strict=True):
            timed = p.size == full
            lines.append(
                StepLine(p.step, p.epoch, loss, p.lr, scale, False, ms, p.data_time_ms, timed)
            )
            if self._sums.epoch not in (0, p.epoch):  # an epoch without validation ended unseen
                closed.append(self._close_epoch(NO_SCORES))
            self._sums.epoch = p.epoch
            self._sums.add(loss, correct, p.size)
        self._observer.steps(lines)
        for epoch in closed:
            self._observer.epoch(epoch)
        broken = next((x for x in lines if not math.isfinite(x.loss)), None)
        if broken is not None:
            raise RunFailedError(
                f"the loss became {broken.loss} at step {broken.step} in "
                f"precision={self.parts.precision.policy.name} (lr {broken.lr:g}); "
                "try a smaller train.lr, train.clip_norm, or precision=fp32 to tell the model "
                "from the precision"
            )

    def _close_epoch(self, validation: Scores) -> Epoch:
        """The scores of the epoch whose steps were last read; the next one starts from zero."""
        ended, self._sums = self._sums, _Sums()
        self._last_scores = ended.scores()
        return {"epoch": ended.epoch, "train": self._last_scores, "validation": validation}

    def evaluate(self, batches: Batches) -> Scores:
        """Mean loss and accuracy over a set in its stored order; nulls for an empty one."""
        parts, sums = self.parts, _Sums()
        if not len(batches.data):
            return sums.scores()
        readings, sizes = readings_for(batches.device), []
        parts.model.eval()
        with torch.no_grad():
            for batch in batches:
                output = parts.precision.forward(parts.model, batch.inputs)
                loss = parts.recipe.loss(output, batch.targets)
                readings.put(loss, parts.recipe.correct(output, batch.targets))
                sizes.append(batch.size)
                if readings.full:
                    sums.add_all(readings.take(), sizes)
                if self._stop():
                    raise StopRequestedError
        sums.add_all(readings.take(), sizes)
        return sums.scores()


class _Sums:
    """Sums over the samples of an epoch that become means; epoch 0 is none."""

    def __init__(self) -> None:
        self.epoch = 0
        self._loss = 0.0
        self._correct: int | None = None
        self._samples = 0

    def add_all(self, readings: list[Reading], sizes: list[int]) -> None:
        """Add the readings of batches of these sizes; empties `sizes`."""
        for reading, size in zip(readings, sizes, strict=True):
            self.add(*reading, size)
        sizes.clear()

    def add(self, loss: float, correct: int | None, size: int) -> None:
        self._loss += loss * size
        self._samples += size
        if correct is not None:
            self._correct = (self._correct or 0) + correct

    def state_dict(self) -> dict[str, float | int | None]:
        return {
            "epoch": self.epoch,
            "loss": self._loss,
            "correct": self._correct,
            "samples": self._samples,
        }

    def scores(self) -> Scores:
        if not self._samples:
            return NO_SCORES
        accuracy = None if self._correct is None else self._correct / self._samples
        return {"loss": self._loss / self._samples, "accuracy": accuracy}
