"""Observes a training loop that is not mprun's, and leaves the record of a run.

    with mprun.observe(model, optimizer, out="runs/bf16", seed=0) as run:
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)          # optional: what `mprun compare` judges by
    print(run)

Hooks follow the loop's own calls (`StepHooks`), and no bit of the training changes. `mprun compare`
reads the record. What costs time is done in the first steps, which are not timed (`StepProbes`).
What remains is a read of the clock and of each gradient in every step. `TrainerRecord` does the
same by the callbacks of a trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.errors import first_line
from mprun.precision import Precision
from mprun.precision._torch import original_module
from mprun.records.run_config import variant_hash
from mprun.records.run_record import Metric, Summary
from mprun.train.clock import clock_for
from mprun.train.observe.observed_record import (
    ObservedRecord,
    ObservedStep,
    checked,
    configuration,
    first_summary,
    metric_of,
    report_text,
    samples_of,
    split_of,
)
from mprun.train.observe.step_probes import (
    NonfiniteStep,
    StepProbes,
    all_finite,
    device_of,
    gradients,
    mode_name,
    nonfinite_names,
    observed_row,
)
from mprun.train.stopwatch import Stopwatch
from mprun.watch.audit import Audit
from mprun.watch.nonfinite.saved_step import StepCapture
from mprun.watch.step_events import StepHooks, StepListener, entries, plain_optimizers

logger = logging.getLogger("mprun")

# A crash loses the lines of at most a second, and fast loops do not write at every step
WRITE_EVERY_S = 1.0
MAX_NAMES = 20  # Of the gradients that are not finite: one NaN of the loss spoils all of them
NO_STEP = (
    "no step was observed: the loop has to call the model and each optimizer that were given to "
    "mprun.observe"
)
ON_NONFINITE = ("off", "report", "save")


class Observation(StepListener):
    """What `mprun.observe` yields; its arguments are those of `observe`.

    Attributes:
        audit: the dtype audit of the second step that is taken; None before it.
        nonfinite: the first step with a NaN or an infinity; None without one.
        summary: the record so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        out: Path,
        name: str | None,
        seed: int,
        metric: Metric,
        memory: bool,
        on_nonfinite: str,
        precision: Precision | None,
    ) -> None:
        self._model, self._optimizers, self._name = model, optimizers, name
        self._precision, self._on_nonfinite = precision, on_nonfinite
        self._probes = StepProbes(model, optimizers, memory)
        device = device_of(model)
        self._clock, self._watch = clock_for(device), Stopwatch()
        self._capture = StepCapture(model, optimizers) if on_nonfinite == "save" else None
        # first in the list: what the capture does at a call is not part of the step's time
        first = [] if self._capture is None else [self._capture]
        self._hooks = StepHooks(model, optimizers, [*first, self._probes, self])
        row = observed_row(model, optimizers, None, precision)
        mode = mode_name(row) if precision is None else precision.policy.name
        self.summary: Summary = first_summary(model, optimizers, row, mode, name, seed, metric)
        self.nonfinite: NonfiniteStep | None = None
        self._config = self._configuration()
        self._record = ObservedRecord(out, self.summary, device, self._watch)
        self._waiting: list[ObservedStep] = []
        """Steps that are not written yet; the loop may still log values of the last one."""
        self._unread: list[tuple[int, Tensor, tuple[str, ...]]] = []
        """Steps that were checked on the device, the answers, and of what; nothing: gradients."""
        self._current: ObservedStep | None = None
        self._steps = 0
        self._ended_at: float | None = None
        self._written_at = time.perf_counter()

    # ---- the loop's calls ------------------------------------------------------------------------

    @property
    def audit(self) -> Audit | None:
        return self._probes.audit

    @property
    def out(self) -> Path:
        """The folder of the record."""
        return self._record.path

    def log(self, **values: Any) -> None:
        """Log values of the step that was just taken, or of a validation or test.

        Args:
            values: numbers or scalar tensors: `loss`, other figures of the training, and with the
                prefix validation_, val_, eval_ or test_ those of a validation or the test.

        Raises:
            TypeError, ValueError: a value is no number.
        """
        began = time.perf_counter()
        with self._watch.during("logging"):
            rows: dict[str, dict[str, Any]] = {"train": {}, "validation": {}, "test": {}}
            for key, value in values.items():
                split, name = split_of(key)
                rows[split][name] = checked(key, value)
            # loops log before the optimizer's step, or after it
            step = self._current or (self._waiting[-1] if self._waiting else None)
            if step is not None:
                step.values.update(rows["train"])
            if rows["validation"]:
                self._write()  # the training values since the last validation belong to this one
                self._record.validation({k: float(v) for k, v in rows["validation"].items()})
            if rows["test"]:
                self._record.test({k: float(v) for k, v in rows["test"].items()})
        if self._ended_at is not None:  # else logging would count as a wait for data
            self._ended_at += time.perf_counter() - began

    def note_batch(self, batch: Any) -> None:
        """Remember a batch with its targets, for a step that is saved: call it once a batch."""
        if self._capture is not None:
            self._capture.note_batch(batch)

    def begin_step(self) -> None:
        """The batch is ready: for loops that know; else the model's first call begins the step."""
        self._hooks.begin_step()

    def begin_call(self, batch: Any) -> None:
        """A micro-batch is ready: for loops that know, and may not call the model itself."""
        self._hooks.begin_call(batch)

    def __str__(self) -> str:
        return report_text(self.summary, self.audit, self.nonfinite, self._probes.notes)

    # ---- StepListener ----------------------------------------------------------------------------

    def on_step_begin(self) -> None:
        now = self._watch.switch("logging")
        self._steps += 1
        waited = None if self._ended_at is None else (now - self._ended_at) * 1e3
        step = ObservedStep(self._steps, data_time_ms=waited)
        if now - self._written_at > WRITE_EVERY_S:
            self._write()
        if self._steps == 1:
            self._probes.before(1)
        step.timed = not self._probes.looks
        self._current = step
        self._watch.switch("compute")
        self._clock.start()

    def on_micro_batch(self, module: nn.Module | None, inputs: tuple[Any, Any]) -> None:
        assert self._current is not None
        args, kwargs = inputs
        self._current.calls[id(module)].append(samples_of(args) or samples_of(kwargs))

    def on_evaluation(self) -> None:
        # inside of a step, a call without gradients is part of the step
        if self._current is None and self._ended_at is not None:
            self._ended_at = None
            self._clock.pause()  # its time is not part of the next step's
            self._watch.switch("evaluation")

    def on_loss(self, loss: Tensor) -> None:
        # `backward` of something else than a loss, or outside of a step
        if self._current is None or loss.numel() != 1 or not loss.is_floating_point():
            return
        loss = loss.detach()
        if self._precision is not None:  # its loss scale may have made an infinity
            loss = loss.nan_to_num(math.nan, 0.0, 0.0)
        finite = math.isfinite(float(loss)) if loss.is_cpu else loss.isfinite()  # read later
        self._current.finite.append(finite)

    def on_update_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = self._current
        assert step is not None
        if self._on_nonfinite == "off" or self.nonfinite is not None:
            return
        if self._check_loss(step):
            return
        flag = getattr(optimizer, "found_inf", None)
        if flag is not None:  # a loss scale decides about this step
            return
        self._check(step.step, all_finite(gradients(optimizer)))

    def _check_loss(self, step: ObservedStep) -> bool:
        """Report and save an output or a loss that is not finite, which no loss scale helps."""
        if self._capture is not None and (names := tuple(self._capture.outputs_with_nan())):
            self._on_nonfinite_step(step.step, names)
            return True
        return any(self._check(step.step, x, ("the loss",)) for x in step.finite)

    def _check(self, step: int, finite: Tensor | bool, names: tuple[str, ...] = ()) -> bool:
        if isinstance(finite, Tensor) and self._on_nonfinite == "report":
            self._unread.append((step, finite, names))  # read later, so that nothing waits for it
            return False
        if not finite and self.nonfinite is None:
            self._on_nonfinite_step(step, names)
        return not finite

    def on_step_end(self, skipped: bool) -> None:
        self._clock.stop()
        self._watch.switch("logging")
        step, self._current = self._current, None
        assert step is not None
        if skipped and self._on_nonfinite != "off" and self.nonfinite is None:
            self._check_loss(step)  # a scaler does not call an optimizer that it skips
        step.skipped, step.lr = skipped, float(self._optimizers[0].param_groups[0].get("lr", 0.0))
        self._waiting.append(step)
        self._probes.after(skipped)
        if self._capture is not None:
            self._capture.next_step()
        if step.step == 1:  # what is not known before a step: the dtypes of autocast, the batch
            self._record.batch(step)
            self._read_precision()
        self._probes.before(step.step + 1)
        self._ended_at = self._watch.switch("data")

    # ---- the record ------------------------------------------------------------------------------

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The record is begun, and ended with the status of what runs inside."""
        self._record.config(self._config)
        self._record.summary()
        try:
            with self._hooks.attached():
                yield
        except KeyboardInterrupt:
            self.summary.status, self.summary.error = "interrupted", "Ctrl-C"
            raise
        except BaseException as error:
            self.summary.status, self.summary.failed_by = "failed", "run"
            self.summary.error = f"{type(error).__name__}: {first_line(error)}"
            raise
        else:
            self.summary.status = "completed"
        finally:
            self._close()

    def _close(self) -> None:
        self._watch.switch("logging")
        self._probes.close()
        if self._capture is not None:
            self._capture.next_step()
        with contextlib.suppress(RuntimeError):  # a device that failed cannot be read
            self._write()
        summary = self.summary
        failure = self._record.last_part.failure() if summary.steps else NO_STEP
        if failure and summary.status == "completed":
            summary.status, summary.error, summary.failed_by = "failed", failure, "run"
            logger.warning(failure)
        self._read_precision()
        self._probes.note_missing()
        summary.memory_bytes = replace(summary.memory_bytes, **self._probes.bytes_by_category())
        if self.audit is not None:
            summary.warnings += [f"{f.kind} {f.module}: {f.text}" for f in self.audit.findings]
        summary.warnings += self._probes.notes
        self._probes.notes += self._record.close()

    def _read_precision(self) -> None:
        summary, read = self.summary, self._probes.autocast
        row = observed_row(self._model, self._optimizers, read, self._precision)
        if self._precision is None:
            summary.precision = mode_name(row)
            summary.variant = self._name or summary.precision
        # config.yaml has both, and its hash tells variants apart
        if row != summary.effective or summary.batch_size != self._config["batch"]["effective"]:
            summary.requested = summary.effective = row
            self._config = self._configuration()
            self._record.config(self._config)

    def _configuration(self) -> dict[str, Any]:
        """What config.yaml has; its hash becomes the summary's."""
        config = configuration(self._model, self._optimizers, self.summary)
        self.summary.variant_hash = variant_hash(config)
        return config

    def _write(self) -> None:
        """Write the steps that have ended."""
        self._record.steps(self._waiting, self._clock.take())
        for number, finite, names in self._unread:
            if self.nonfinite is None and not finite:
                self._on_nonfinite_step(number, names)
        self._unread, self._waiting = [], []
        self._written_at = time.perf_counter()

    def _on_nonfinite_step(self, step: int, names: tuple[str, ...] = ()) -> None:
        """Something was not finite: report and save; without names a sum of gradients."""
        weights = dict(self._model.named_parameters())
        held = {f"the gradient of {name}": p.grad for name, p in weights.items()}
        names = names or tuple(nonfinite_names(held))
        if not names:  # the sum overflowed, the gradients are finite
            return
        # a weight that was not finite before explains the gradient: it is named first
        names = (*(f"{n}, before the step" for n in nonfinite_names(weights)), *names)[:MAX_NAMES]
        file = self._save(step, f"{names[0]} is not finite")
        self.nonfinite = NonfiniteStep(step, names, file)
        row = {"kind": "event", "event": "nonfinite", "step": step, "names": list(names)}
        self._record.event(row)
        text = f"step {step}: {names[0]} is not finite"
        text += f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        self.summary.warnings.append(text)
        logger.warning(text + (f"; saved: mprun replay {file}" if file else ""))

    def _save(self, step: int, reason: str) -> Path | None:
        if self._capture is None:
            return None
        path = self.out / f"nonfinite_step_{step}.pt"
        try:
            self._capture.save(path, step, reason, self._probes.autocast)
        except Exception as error:  # inputs of any type, a full disk: the training goes on
            logger.warning("step %d could not be saved: %s", step, first_line(error))
            return None
        return path


@contextmanager
def observe(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    out: str | Path,
    name: str | None = None,
    seed: int | None = None,
    metric: str | tuple[str, str] = "loss",
    memory: bool = False,
    on_nonfinite: Literal["off", "report", "save"] = "report",
    precision: Precision | None = None,
) -> Iterator[Observation]:
    """Observe the training inside, and leave a record of it.

    Args:
        model: what trains; an `nn.ModuleList` of several models that train together.
        optimizer: its optimizer, or several; a step ends when each has stepped at least once.
        out: the folder of the record, new or empty.
        name: of the variant in comparisons; None for the precision mode, read from the loop.
        seed: pairs this run with others of the same seed; None for `torch.initial_seed()`.
        metric: what comparisons judge by: loss, or a name that the loop logs. One whose better
            direction is not known comes with it: ("bleu", "max").
        memory: count activations, temporaries and the peak, in two steps that are not timed.
        on_nonfinite: at the first NaN or infinity in a gradient: report it, or also save the step
            to a file for `mprun replay`.
        precision: the `mprun.Precision` of the loop, if it has one.

    Yields:
        What is observed so far; `log(...)` takes the loop's values.

    Raises:
        FileExistsError: `out` has a run already.
        TypeError, ValueError: an argument is not legal.
        OSError: the folder cannot be written at the start. Later, a full disk ends the record
            and not the training.
    """
    if not issubclass(type(model), nn.Module):
        kind = type(model).__name__
        raise TypeError(f"a model of type {kind}; legal: a module, of several an nn.ModuleList")
    optimizers = plain_optimizers(optimizer)
    if not optimizers:
        raise ValueError("there is no optimizer: name the one that trains the model")
    if on_nonfinite not in ON_NONFINITE:
        raise ValueError(f"on_nonfinite={on_nonfinite!r}; legal: {', '.join(ON_NONFINITE)}")
    # a file for `mprun replay` holds one call of one model
    if on_nonfinite == "save" and entries(original_module(model)) != [original_module(model)]:
        raise ValueError(
            "on_nonfinite='save' needs one model with a forward pass; observe each with its own"
        )
    metric_name, higher = metric_of(metric)
    run = Observation(
        model,
        optimizers,
        Path(out),
        name,
        torch.initial_seed() if seed is None else seed,
        Metric(name=metric_name, higher_is_better=higher),
        memory,
        on_nonfinite,
        precision,
    )
    with run.recorded():
        yield run


# ---- trainers ------------------------------------------------------------------------------------

NOT_ENDED = "the trainer did not end the training"


class TrainerRecord:
    """The record of a trainer's training: what the callbacks of all trainers do.

    It enters `observe` where a training begins, and leaves it where the training ends or fails.

    Args:
        out: the folder of the record, new or empty. A second training of the same callback gets
            `OUT_2`, and so on.
        name, seed, metric, memory, on_nonfinite: as in `mprun.observe`; without a seed the
            trainer's counts.
        audit: whether the findings of the dtype audit are logged as warnings (logger "mprun") after
            the second step; the record has them in any case.

    Attributes:
        run: what is observed, also when the training is over (its `audit`, `summary`, `out`); None
            before it.
    """

    def __init__(
        self,
        out: str | Path = "mprun_run",
        name: str | None = None,
        seed: int | None = None,
        metric: str | tuple[str, str] = "loss",
        memory: bool = False,
        on_nonfinite: Literal["off", "report", "save"] = "report",
        audit: bool = True,
    ) -> None:
        self._out, self._audit = Path(out), audit
        self._seed = seed
        self._observe = partial(
            observe, name=name, metric=metric, memory=memory, on_nonfinite=on_nonfinite
        )
        self._trainings = 0
        self._stack: ExitStack | None = None
        self._loss_logged = self._reports_audit = False
        self.run: Observation | None = None

    @property
    def running(self) -> Observation | None:
        """What is observed now; None outside of a training."""
        return None if self._stack is None else self.run

    def begin(self, model: nn.Module, optimizers: list[Any], seed: int | None) -> None:
        """A training begins; optimizers may be wrappers of Accelerate or Lightning.

        Raises:
            FileExistsError: the folder has a run.
        """
        self.end(RuntimeError(NOT_ENDED))  # Hugging Face's Trainer calls nothing where it fails
        self._trainings += 1
        number = "" if self._trainings == 1 else f"_{self._trainings}"
        out = self._out.with_name(f"{self._out.name}{number}")
        seed = seed if self._seed is None else self._seed
        stack = ExitStack()
        plain = plain_optimizers(optimizers)
        self.run = stack.enter_context(self._observe(model, plain, out, seed=seed))
        self._stack, self._loss_logged, self._reports_audit = stack, False, self._audit
        atexit.register(self._at_exit)

    def end(self, error: BaseException | None = None) -> None:
        """The training is over; `error` is what ended it early. Nothing where it was already."""
        stack, self._stack = self._stack, None
        if stack is None:
            return
        atexit.unregister(self._at_exit)
        stack.__exit__(
            None if error is None else type(error), error, getattr(error, "__traceback__", None)
        )

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Log the trainer's values that are numbers.

        It is not called `log`: Lightning puts its module's method of that name into each callback.
        """
        numbers = {k: v for k, v in values.items() if _is_number(v)}
        if self.running is not None and numbers:
            self._loss_logged |= "loss" in numbers
            self.running.log(**numbers)

    def log_training_loss(self, value: Any) -> None:
        """The mean loss of the training, for trainers that logged none before its end."""
        if not self._loss_logged:
            self.log_values({"loss": value})

    def report_audit(self) -> None:
        """Log the findings of the audit, once: for the end of each step."""
        run = self.running
        if self._reports_audit and run is not None and run.audit is not None:
            self._reports_audit = False
            for finding in run.audit.findings:
                where = finding.module or "the model"
                logger.warning("%s  %s: %s", finding.kind, where, finding.text)
                logger.warning("    fix: %s", finding.fix)

    def _at_exit(self) -> None:
        """The program ends inside of a training: an error did it, or Ctrl-C."""
        error = getattr(sys, "last_value", None)  # Python's last error that nobody caught
        self.end(error if isinstance(error, BaseException) else RuntimeError(NOT_ENDED))


def _is_number(value: Any) -> bool:
    if hasattr(value, "numel"):  # a tensor
        return bool(value.numel() == 1)
    return isinstance(value, (int, float)) and not isinstance(value, bool)
