"""What the callbacks of all trainers do: one observed training after the other.

A trainer calls its callbacks at its own moments. `TrainerRecord`, their base, turns them into
`mprun.observe`: it enters it where a training begins and leaves it where the training ends, or
fails.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from mprun.train.observe.observe import Observation, observe
from mprun.watch.nonfinite import NonfiniteReport, finding_lines, fp_exceptions
from mprun.watch.step_events import plain_optimizers

logger = logging.getLogger("mprun")

NOT_ENDED = "the trainer did not end the training"


class TrainerRecord:
    """The record of a trainer's training.

    Args:
        out: the folder of the record, new or empty. A second training of the same callback gets
            `OUT_2`, and so on.
        name, seed, metric, memory, on_nonfinite: as in `mprun.observe`; without a seed the
            trainer's counts.
        audit: whether the findings of the dtype audit are logged as warnings (logger "mprun") after
            the second step; the record has them in any case.
        fp_exceptions: the first and the last step, counted from 1, in which every op is inspected
            for NaN and infinities (`mprun.numerics.fp_exceptions`). Such steps are slow and are not
            timed. None for no step.

    Attributes:
        run: what is observed, also when the training is over (its `audit`, `summary`, `out`); None
            before it.
        fp_report: the floating-point exceptions of the inspected steps.

    Raises:
        ValueError: the window of steps is not legal, or `memory` is set as well.
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
        fp_exceptions: tuple[int, int] | None = None,
    ) -> None:
        self._out, self._audit = Path(out), audit
        self._seed = seed
        self._window = _window(fp_exceptions, memory)
        self._options: dict[str, Any] = {
            "name": name,
            "metric": metric,
            "memory": memory,
            "on_nonfinite": on_nonfinite,
        }
        self._trainings = 0
        self._stack: ExitStack | None = None
        self._inspection: ExitStack | None = None
        """Entered while the ops of steps are inspected."""
        self._model: nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._loss_logged = self._reports_audit = False
        self.run: Observation | None = None
        self.fp_report: NonfiniteReport | None = None

    @property
    def running(self) -> Observation | None:
        """What is observed now; None outside of a training."""
        return None if self._stack is None else self.run

    def begin(self, model: nn.Module, optimizers: list[Any], seed: int | None) -> None:
        """A training begins.

        Args:
            model: what trains.
            optimizers: PyTorch's, or wrappers of Accelerate or Lightning.
            seed: the trainer's.

        Raises:
            FileExistsError: the folder has a run.
        """
        self.end(RuntimeError(NOT_ENDED))  # Hugging Face's Trainer calls nothing where it fails
        self._trainings += 1
        number = "" if self._trainings == 1 else f"_{self._trainings}"
        out = self._out.with_name(f"{self._out.name}{number}")
        seed = seed if self._seed is None else self._seed
        self._model, self._optimizers = model, plain_optimizers(optimizers)
        stack = ExitStack()
        self.run = stack.enter_context(
            observe(model, self._optimizers, out=out, seed=seed, **self._options)
        )
        self._stack, self._loss_logged, self._reports_audit = stack, False, self._audit
        atexit.register(self._at_exit)

    def end(self, error: BaseException | None = None) -> None:
        """The training is over; `error` is what ended it early. Nothing where it was already."""
        stack, self._stack = self._stack, None
        if stack is None:
            return
        atexit.unregister(self._at_exit)
        self._end_inspection(error)
        _close(stack, error)

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

    def begin_step(self, step: int) -> None:
        """The step with this number begins, counted from 1; it may have begun before."""
        # micro-batches of a step call this again
        if self._inspection is not None or self.running is None or step not in self._window:
            return
        assert self._model is not None
        self.running.times_steps, self._inspection = False, ExitStack()
        self.fp_report = self._inspection.enter_context(
            fp_exceptions(self._model, self._optimizers, first_step=step)
        )

    def end_step(self, step: int) -> None:
        """The step with this number is over."""
        run = self.running
        if run is None:
            return
        if step >= self._window.stop - 1:
            self._end_inspection(None)
        if self._reports_audit and run.audit is not None:
            self._reports_audit = False
            for finding in run.audit.findings:
                where = finding.module or "the model"
                logger.warning("%s  %s: %s", finding.kind, where, finding.text)
                logger.warning("    fix: %s", finding.fix)

    def _end_inspection(self, error: BaseException | None) -> None:
        inspection, self._inspection = self._inspection, None
        if inspection is not None and self.run is not None and self.fp_report is not None:
            self.run.times_steps = True  # inspected steps are many times slower
            _close(inspection, error)
            self.run.summary.warnings += finding_lines(self.fp_report.findings)

    def _at_exit(self) -> None:
        """The program ends inside of a training: an error did it, or Ctrl-C."""
        error = getattr(sys, "last_value", None)  # Python's last error that nobody caught
        self.end(error if isinstance(error, BaseException) else RuntimeError(NOT_ENDED))


def _close(stack: ExitStack, error: BaseException | None) -> None:
    """Leave what was entered: with `error`, if there is one."""
    if error is None:
        stack.close()
    else:
        stack.__exit__(type(error), error, error.__traceback__)


def _window(given: Any, memory: bool) -> range:
    """The steps that are inspected."""
    if given is None:
        return range(0)
    pair = tuple(given) if isinstance(given, (tuple, list)) else ()
    numbers = len(pair) == 2 and all(type(x) is int for x in pair)  # no bool
    if not numbers or not 1 <= pair[0] <= pair[1]:
        raise ValueError(
            f"fp_exceptions={given!r}; legal: None, or the first and the last step: (100, 110)"
        )
    if memory:
        raise ValueError("fp_exceptions and memory=True both follow every op: choose one")
    return range(pair[0], pair[1] + 1)


def _is_number(value: Any) -> bool:
    if hasattr(value, "numel"):  # a tensor
        return bool(value.numel() == 1)
    return isinstance(value, (int, float)) and not isinstance(value, bool)
