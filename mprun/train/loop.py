"""The training loop.

It has no code for a precision mode, a file or the terminal. A `Precision` computes forward and
backward and steps, a `Clock` times the step, callbacks are notified of events. Losses stay on the
device and are read a fraction of a second late, many at once, so logging each step on CUDA needs no
synchronization.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from mprun.errors import RunFailedError
from mprun.precision import Precision
from mprun.precision._torch import is_fake
from mprun.precision.apply import forward_backward, needs_closure
from mprun.precision.nested import map_tensors
from mprun.recipe import Recipe
from mprun.records.run_record import AveragedScores, Epoch, Scores
from mprun.train.callbacks import Callback, StepLine
from mprun.train.checkpoint import ProcessTimes, restore_random_numbers, saved_random_numbers
from mprun.train.clock import Clock
from mprun.train.data import Batch, Batches, Order
from mprun.train.evaluation import Evaluator, PartEnds
from mprun.train.loss_terms import LossTerms
from mprun.train.parallel.layouts import Layout
from mprun.train.parallel.ranks import Ranks
from mprun.train.recipe_metrics import MetricPass, RecipeMetric, metrics_of
from mprun.train.stopwatch import Stopwatch, TimeLimit
from mprun.train.sums import (
    NO_SCORES,
    MetricReadback,
    Scalars,
    Sums,
    count_correct,
    step_sums,
    with_metrics,
)
from mprun.train.weight_average import NoAverage, WeightAverage


class StopRequestedError(Exception):
    """The user or the system asked the run to end; it ended between two steps."""


@dataclass(frozen=True)
class Limits:
    """Training ends at the first of these limits; None is no limit."""

    epochs: int | None
    max_steps: int | None
    max_time_s: float | None  # Of the whole run, evaluation included

    def planned_steps(self, steps_per_epoch: int | None) -> int | None:
        """Optimizer steps if time does not run out; None where only time or the data decide."""
        known = [] if self.max_steps is None else [self.max_steps]
        if self.epochs is not None and steps_per_epoch is not None:
            known.append(self.epochs * steps_per_epoch)
        return min(known, default=None)


class Schedule:
    """Moves the learning rate after each step that the optimizer takes; None for a constant one."""

    def __init__(self, scheduler: LRScheduler | None = None) -> None:
        self._scheduler = scheduler

    def step(self, skipped: Tensor | None) -> None:
        """A step was attempted; `skipped` is 1 if it was not taken, None if none ever is."""
        if self._scheduler is None:
            return
        # Skipped steps do not count: a run whose first ones overflow would warm up untrained.
        # On an accelerator the host waits for the flag; fake tensors have no value.
        if skipped is None or is_fake(skipped) or not skipped.item():
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""
        return {} if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue.

        Raises:
            KeyError: it is the state of no schedule.
        """
        if self._scheduler is not None:
            if "_schedulers" not in state:  # a chain counts in its members
                self._scheduler.last_epoch = state["last_epoch"]
            self._scheduler.load_state_dict(state)


@dataclass
class TrainingComponents:
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
    clock: Clock
    readback: MetricReadback
    layout: Layout = field(default_factory=Layout)
    """What this process holds of the model, and how it meets the others."""
    backward: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context around the backward passes of a step."""


class _Pending(NamedTuple):
    """A step whose loss and times are not read yet."""

    line: StepLine
    size: int
    weight: float


class StepResult(NamedTuple):
    """The results of an optimizer step, on the device."""

    loss: Tensor  # The batch's mean loss, unscaled
    outputs: list[Any]  # The model's outputs, one for each part of the batch
    skipped: Tensor | None  # 1 if the step was not taken, else 0; None if no step is ever skipped
    parts: dict[str, Tensor]  # The named parts of the loss


class Closure:
    """The loss of a step, which an optimizer such as L-BFGS asks for several times.

    The first time it is that of the pass that was made; then gradients are computed anew.
    """

    def __init__(self, made: StepResult, again: Callable[[], StepResult]) -> None:
        self._made: StepResult | None = made
        self._again = again

    def __call__(self) -> Tensor:
        result, self._made = self._made or self._again(), None
        return result.loss


class Trainer:
    """Trains, validates and tests, and notifies the callbacks, in their order.

    `stop` is called between steps; true ends the run at once. Without `checkpoint_every_steps`
    there is one checkpoint, at the end. `validations` are at equal parts of the planned steps,
    besides those after each epoch; `average_weights` is the number of places in `WeightAverage`.
    """

    def __init__(
        self,
        parts: TrainingComponents,
        limits: Limits,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] = lambda: False,
        checkpoint_every_steps: int | None = None,
        watch: Stopwatch | None = None,
        *,
        validations: int = 0,
        average_weights: int = 0,
    ) -> None:
        self.parts = parts
        self._validations, self._average_weights = validations, average_weights
        self.step = self.epoch = 0
        self._ranks = parts.layout.ranks
        self._watch = watch or Stopwatch()
        self.limit(limits)
        self._callbacks = callbacks
        self._stop = stop
        self._checkpoint_every = checkpoint_every_steps or sys.maxsize  # no step number reaches it
        self._pending: list[_Pending] = []
        self._step_sums = step_sums(self._ranks)
        self._spent_before_s = 0.0
        self._sums = Sums()
        self._loss = LossTerms(parts.recipe)
        self._metric_pass = MetricPass({}, parts.train.device)
        self._step_times = ProcessTimes(self._ranks)
        self._last_scores = NO_SCORES
        self._skipped_in_a_row = 0
        self._saved_step: int | None = None  # of the last checkpoint: none is written twice
        self._is_asked_to_stop = self._stops = False
        self._in_epoch = False
        self._read_whole_epoch = False
        self._batches_done = 0
        # before the epoch's order is drawn: a run resumed inside the epoch draws the same one
        self._order_state = parts.order.state()

    @cached_property
    def _metrics(self) -> dict[str, RecipeMetric]:
        return metrics_of(self.parts.recipe)

    def _new_metric_pass(self) -> MetricPass:
        return MetricPass(self._metrics, self.parts.train.device, self._ranks)

    def limit(self, limits: Limits) -> None:
        """Set when the next `fit` ends."""
        parts = self.parts
        self._planned = limits.planned_steps(parts.train.length)
        validations = 0 if parts.validation.is_empty else self._validations
        self._validated = PartEnds(self._planned, validations)
        self._most_epochs = math.inf if limits.epochs is None else limits.epochs
        evaluated = (parts.validation.samples or 0) + (parts.test.samples or 0)
        self._average = NoAverage()
        is_scored = not (parts.validation.is_empty and parts.test.is_empty)
        if self._average_weights and self._planned and is_scored:
            self._average = WeightAverage(parts.layout, self._planned, self._average_weights)
            evaluated *= 2
        self._time = TimeLimit(limits.max_time_s, self._watch, evaluated)

    def fit(self) -> None:
        """Train until a limit, validating after each epoch; continues a state that was loaded.

        Raises:
            StopRequestedError: `stop` returned true; all steps so far were reported and saved.
            RunFailedError: the loss became NaN or infinite, or the loss scale cannot work.
        """
        self._step_sums.restart()
        self._is_asked_to_stop = self._stops = False
        try:
            self._time.begin(self._spent_before_s)
            while self._in_epoch or not self._finished():
                self._one_epoch()
        except StopRequestedError:
            for callback in self._callbacks:
                callback.on_interrupt(self.train_scores())
            self._save()
            raise
        except Exception:
            self._step_sums.after_fault(self._flush)
            raise
        self._flush()
        self._save_once()
        if self._sums.epoch:  # the last epoch had no validation, which would have ended it
            self._end_epoch(NO_SCORES)

    def _one_epoch(self) -> None:
        if not self._in_epoch:
            self.epoch += 1
            self._order_state, self._batches_done = self.parts.order.state(), 0
            self._in_epoch, self._read_whole_epoch = True, False
            if self._metrics:
                self._metric_pass = self._new_metric_pass()
        self._train_epoch()
        if self._finished():
            # Saved inside the epoch: a run resumed with more steps continues inside it.
            self._flush()
            self._save_once()
        if not self.parts.validation.is_empty or self._metrics:
            self._flush()
            self.parts.clock.pause()  # validation is not part of the next step's time
            self._end_epoch(self.evaluate(self.parts.validation))
        self._in_epoch = False

    def _save_once(self) -> None:
        """Save a checkpoint, unless the last one is of this step."""
        if self._saved_step != self.step:
            self._save()

    def _save(self) -> None:
        self._saved_step = self.step
        with self._watch.during("checkpoints"):
            state = self.state_dict()
            for callback in self._callbacks:
                callback.on_checkpoint(state)
        self.parts.clock.pause()

    def train_scores(self) -> Scores:
        """Means over the samples of the current epoch, or of the last one if it just ended."""
        return self._sums.scores() if self._sums.epoch else self._last_scores

    def state_dict(self) -> dict[str, Any]:
        """Everything the loop needs to continue exactly from here, between two steps."""
        parts, last, layout = self.parts, self._last_scores, self.parts.layout
        return {
            "step": self.step,
            "epoch": self.epoch,
            "in_epoch": self._in_epoch,
            "batches_done": self._batches_done,
            "trained_s": self._time.spent_s,
            "skipped_in_a_row": self._skipped_in_a_row,
            "sums": self._sums.state_dict(),
            # metrics only where there are some, as before recipes had metrics
            "last_scores": {k: v for k, v in vars(last).items() if k != "metrics" or v},
            "order": self._order_state,
            "next_order": parts.order.state(),
            "model": layout.model_state(parts.model),
            "optimizer": layout.optimizer_state(parts.optimizer),
            "scheduler": parts.scheduler.state_dict(),
            "loss_scale": parts.precision.loss_scale.state_dict(),
            **saved_random_numbers(self._ranks),
            **self._step_times.gathered(),
            **self._metric_pass.state_dict(),
            **self._average.state_dict(parts.model),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`'s state: the steps that follow are the same, bit for bit."""
        parts = self.parts
        self.step, self.epoch = state["step"], state["epoch"]
        self._saved_step = self.step
        self._in_epoch, self._batches_done = state["in_epoch"], state["batches_done"]
        self._spent_before_s = state["trained_s"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self._sums.load_state_dict(state["sums"])
        self._metric_pass = self._new_metric_pass()
        self._metric_pass.load_state_dict(state)
        self._last_scores = Scores(**state["last_scores"])
        self._order_state = state["order"]
        parts.layout.load_model(parts.model, state["model"])
        parts.layout.load_optimizer(parts.optimizer, state["optimizer"])
        self._average.load_state_dict(parts.model, state)
        parts.scheduler.load_state_dict(state["scheduler"])
        parts.precision.loss_scale.load_state_dict(state["loss_scale"])
        # inside an epoch its order is drawn once more, and the batches already trained are skipped
        parts.order.restore(self._order_state if self._in_epoch else state["next_order"])
        restore_random_numbers(state, self._ranks)

    def _finished(self) -> bool:
        done = self._planned is not None and self.step >= self._planned
        # for a stream, whose number of steps is not planned
        done |= not self._in_epoch and self.epoch >= self._most_epochs
        if done or not self._time.is_limited:
            return done
        return self._ranks.any(self._time.is_training_over())

    def _train_epoch(self) -> None:
        parts, watch = self.parts, self._watch
        asked_at = watch.switch("data")
        if not parts.model.training:  # `train` visits every module
            parts.model.train()
        batches = parts.train.epoch(parts.order.draw(), skip=self._batches_done)
        try:
            while not self._finished():
                # a part of the planned steps ends here, inside the epoch; after the checkpoint, so
                # that a resumed run validates too
                is_inside = self._batches_done > 0 and not self._is_epoch_read
                if is_inside and self.step in self._validated:
                    self._validate_inside()
                    asked_at = watch.switch("data")
                if (batch := next(batches, None)) is None:
                    self._read_whole_epoch = True
                    break
                self._train_on(batch.trained, asked_at)
                asked_at = watch.switch("data")
        finally:
            batches.close()  # a loader that was not read to its end ends its worker processes now

    def _train_on(self, batch: Batch, asked_at: float) -> None:
        """Take a step on a batch that was asked for at a reading of `time.perf_counter`."""
        parts, clock, watch = self.parts, self.parts.clock, self._watch
        ready_at = watch.switch("compute")
        lr = float(parts.optimizer.param_groups[0]["lr"])  # torchao's is a tensor, changed in place
        scale = parts.precision.loss_scale.tensor  # of this step; the step may change it
        batch = parts.layout.weighted(batch)
        waited_s = self._ranks.waited_s
        clock.start()
        result = self.optimizer_step(batch)
        clock.stop()
        step_s = watch.switch("metrics") - ready_at
        self._time.add_step(step_s, batch.size)
        self._step_times.add(step_s, self._ranks.waited_s - waited_s)
        self.step += 1
        self._batches_done += 1
        pairs = zip(result.outputs, batch.parts, strict=True)
        outputs = [output for output, part in pairs if part.size]  # an empty part does not count
        batch = batch.without_idle
        correct = count_correct(parts.recipe, outputs, batch)
        parts.readback.put(Scalars(result.loss, correct, scale, result.skipped, result.parts))
        self._metric_pass.add(outputs, batch, result.skipped)
        line = StepLine(
            step=self.step,
            epoch=self.epoch,
            lr=lr,
            data_time_ms=(ready_at - asked_at) * 1e3,
            timed=parts.train.batch_size in (None, batch.size),  # no partial last batch
        )
        self._pending.append(_Pending(line, batch.size, batch.whole_weight))
        self._between_steps()

    def _between_steps(self) -> None:
        if self._average.is_due(self.step):
            with self._watch.during("evaluation"):
                self._average.add(self.parts.model)
            self.parts.clock.pause()
        save = self.step % self._checkpoint_every == 0
        self._is_asked_to_stop |= self._stop()
        is_due = self._step_sums.is_due(self._is_asked_to_stop)
        if is_due or save or self.parts.readback.full:
            self._flush()
        if self._stops:
            raise StopRequestedError
        if save:
            self._save_once()

    def _validate_inside(self) -> None:
        """Validate inside an epoch: the steps that follow are the same without it."""
        self._flush()
        if self._stops:
            raise StopRequestedError
        modes = [(module, module.training) for module in self.parts.model.modules()]
        random_numbers = saved_random_numbers(Ranks())  # those of this process
        try:
            scores = self.evaluate(self.parts.validation)
        finally:
            restore_random_numbers(random_numbers, Ranks())
            for module, is_training in modes:
                module.training = is_training
        self.parts.clock.pause()
        with self._watch.during("logging"):
            for callback in self._callbacks:
                callback.on_validation(scores, self.step, self.epoch)

    def optimizer_step(self, batch: Batch) -> StepResult:
        """One optimizer step on a batch, in micro-batches."""
        parts = self.parts
        parts.precision.begin_step(self.step + 1)
        result = self._pass(batch)
        again = partial(self._pass, batch)
        closure = Closure(result, again) if needs_closure(parts.optimizer) else None
        skipped = parts.precision.step(parts.optimizer, closure)
        parts.precision.update()
        parts.scheduler.step(skipped)
        return result._replace(skipped=skipped)

    def _pass(self, batch: Batch) -> StepResult:
        """The gradients of a batch, forward and backward."""
        parts, losses, outputs = self.parts, [], []
        terms: dict[str, Tensor] = {}
        parts.optimizer.zero_grad()
        forward, weight = partial(parts.recipe.forward, parts.model), batch.whole_weight
        with parts.precision.step_region(), parts.backward():
            for number, part in enumerate(batch.parts, 1):
                loss, output = forward_backward(
                    parts.precision,
                    forward,
                    self._loss if part.size else self._loss.zero_loss,
                    part.inputs,
                    part.content,
                    share=part.weight / weight,  # so gradients add up to those of the whole batch
                    run=partial(
                        parts.layout.compute,
                        size=part.size,
                        is_last=number == len(batch.parts),
                    ),
                )
                for name, term in self._loss.take_parts().items():
                    terms[name] = terms.get(name, 0) + term * (part.weight / weight)
                losses.append(loss)
                # with their graph, the outputs would hold the activations of every micro-batch
                outputs.append(map_tensors(Tensor.detach, output))
        parts.layout.end_backward()
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        return StepResult(loss, outputs, None, terms)

    def _flush(self) -> None:
        """Read pending metrics off the device and emit them; raise if training is hopeless.

        All processes do it at the same step.
        """
        self._watch.switch("metrics")
        pending, self._pending = self._pending, []
        metrics, self._stops = self._step_sums.over_processes(
            self.parts.readback.take(), self._is_asked_to_stop
        )
        if not pending:
            return
        times = self.parts.clock.take()
        lines, closed = [], []
        for (begun, size, weight), read, step_time in zip(pending, metrics, times, strict=True):
            assert read.loss is not None  # only an evaluated batch may have none
            line = begun._replace(
                loss=read.loss,
                loss_scale=read.loss_scale,
                skipped=read.skipped,
                parts=read.parts,
                step_time_ms=step_time.ms,
                page_faults=step_time.page_faults,
            )
            lines.append(line)
            if self._sums.epoch not in (0, line.epoch):  # an epoch without validation ended
                closed.append((self._close_epoch(NO_SCORES), line.step - 1))
            self._sums.epoch = line.epoch
            self._sums.add(read, size, weight)
        self._report_buffers({line.step: line.epoch for line in lines})
        with self._watch.during("logging"):
            for epoch, step in closed:
                self._notify_epoch(epoch, step)
            for callback in self._callbacks:
                callback.on_steps(lines)
        self.parts.clock.pause()  # the callbacks' time is not part of the next step
        # after the callbacks: the record has the line of the step that ends the run
        for line in lines:
            self._check(line)

    def _report_buffers(self, epochs: dict[int, int]) -> None:
        """Report buffers that became non-finite; `epochs` maps the last steps to their epochs."""
        for overflow in self.parts.precision.buffer_overflows():
            row = {"kind": "event", "event": "buffer_overflow", **overflow._asdict()}
            epoch = epochs.get(overflow.step, self.epoch)  # a step that failed has no line
            for callback in self._callbacks:
                callback.on_event({**row, "epoch": epoch}, overflow.text)

    def _check(self, line: StepLine) -> None:
        """Raise if the loss is not finite and skipping steps does not help."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if line.skipped else 0
        loss_scale, mode = self.parts.precision.loss_scale, self.parts.precision.policy.name
        reason = loss_scale.failure_reason(line.loss_scale, self._skipped_in_a_row)
        if reason is not None:
            raise RunFailedError(f"at step {line.step} in precision={mode}: {reason}")
        if not line.skipped and not math.isfinite(line.loss):
            raise RunFailedError(
                f"the loss became {line.loss} at step {line.step} in precision={mode} "
                f"(lr {line.lr:g}); try a smaller train.lr, train.clip_norm, or precision=fp32 "
                "to see whether the precision is the cause; debug.fp_exceptions=halt names the op"
            )

    @property
    def _is_epoch_read(self) -> bool:
        """Whether the epoch has no further batch, as far as is known before asking its loader."""
        length = self.parts.train.length
        return self._read_whole_epoch or (length is not None and self._batches_done >= length)

    def _close_epoch(self, validation: Scores) -> Epoch:
        """End the epoch of the steps that were read last; the sums start again from zero."""
        ended, self._sums = self._sums, Sums()
        is_cut_off = ended.epoch == self.epoch and not self._is_epoch_read
        scores = with_metrics(ended.scores(), self._metric_pass.compute())
        if is_cut_off:
            scores = replace(scores, samples=ended.samples)
        self._last_scores = scores
        return Epoch(epoch=ended.epoch, train=self._last_scores, validation=validation)

    def _end_epoch(self, validation: Scores) -> None:
        for name in sorted(self._metric_pass.lost):  # a resumed epoch has no value of them
            row = {"kind": "event", "event": "metric_lost", "step": self.step, "epoch": self.epoch}
            for callback in self._callbacks:
                callback.on_event(
                    {**row, "metric": name},
                    f"the training {name} of epoch {self.epoch} is not known: a checkpoint was "
                    "loaded within it, and the metric has no state that it can hold; numbers and "
                    "tensors as its attributes are one, or state_dict and load_state_dict",
                )
        with self._watch.during("logging"):
            self._notify_epoch(self._close_epoch(validation), self.step)

    def _notify_epoch(self, epoch: Epoch, step: int) -> None:
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, step)

    def test(self) -> None:
        """Score the test set, and the averaged weights.

        Raises:
            StopRequestedError: `stop` returned true.
        """
        scores = self.evaluate(self.parts.test)
        with self._watch.during("logging"):
            for callback in self._callbacks:
                callback.on_test(scores, self.step)
        self._score_average()

    @property
    def not_averaged(self) -> str | None:
        """Why averaged weights that are wanted have no scores, a sentence; else None."""
        return self._average.problem

    def _score_average(self) -> None:
        sets = self.parts.validation, self.parts.test
        with self._watch.during("evaluation"), self._average.applied(self.parts.model) as places:
            scores = [self.evaluate(batches) for batches in sets if places]
        if not scores:
            return
        averaged = AveragedScores(places=places, validation=scores[0], test=scores[1])
        with self._watch.during("logging"):
            for callback in self._callbacks:
                callback.on_averaged(averaged, self.step)

    def evaluate(self, batches: Batches) -> Scores:
        """Mean loss and accuracy over a set, as `Evaluator.scores`."""
        with self._watch.during("evaluation"):
            return Evaluator(
                self.parts.recipe,
                self.parts.model,
                self.parts.precision,
                self._raise_if_stopped,
                self._metrics,
                self._ranks,
            ).scores(batches)

    def _raise_if_stopped(self) -> None:
        if self._ranks.any(self._stop()):
            raise StopRequestedError


def unfinished_epoch(state: dict[str, Any]) -> int | None:
    """The epoch that a saved state continues, whose scores are not final; None between two."""
    if state["in_epoch"]:
        return int(state["epoch"])
    return state["sums"]["epoch"] or None
