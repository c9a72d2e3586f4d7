"""Statistics of some steps of a plan's run: looked at in the run, and beside it.

Each step looked at is taken several times from the same weights on the same samples:

    exact       in float32, for the true size of everything; and once more in float64, for which of
                its gradients are rounding errors (mprun/numerics/rounding_errors.py)
    rounded     in float32 from weights of each 16-bit format's precision, for what they do by
                themselves
    float16     at a loss scale that fits this step, found from the exact pass: how far its
                gradients are off, and what the largest number is that float16 had to hold
    bfloat16    how far its gradients are off
    the run's   as asked for, which alone moves the weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mprun.assemble.parts import build_parts
from mprun.assemble.plan import Plan
from mprun.config.settings import NumericsSettings
from mprun.data import Batch
from mprun.errors import RunFailedError, UsageError, first_line
from mprun.experiments.run_probe import EXACT, Probe, as_planned_in, shipped_policy
from mprun.numerics.collect import GRADIENTS, Statistics
from mprun.numerics.findings import FROM_THE_RUN, Findings
from mprun.numerics.float64 import in_float64
from mprun.numerics.formats import FP16
from mprun.numerics.gradients import LargestGradients
from mprun.numerics.loss_scale import largest_power
from mprun.numerics.probe import OWN_SEED, changed
from mprun.numerics.rounding_errors import (
    FLOAT64,
    MOVE,
    MOVED,
    MOVES,
    Reference,
    RoundingErrors,
    is_rounding,
    other_loss,
)
from mprun.numerics.verdicts import Deviations, Errors, Standing, errors, variances
from mprun.train.callbacks import NoObserver
from mprun.train.loop import Limits, Parts, StepResult, StopRequestedError, Trainer

ATTEMPTS = 6
"""How often the loss scale is lowered, by `LOWER` each time, where float16 overflows at it."""
LOWER = 16.0
BELOW, ABOVE = 20, 8
"""How many powers of two on each side of a fitting loss scale are tried."""
LEAST_HALF = 2
"""Samples in half a batch: batch normalisation takes no fewer."""
FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROWS_BY_POWER = ("activation_gradients",)
"""Kinds whose rounding errors are recognised by their power: there are no tensors to compare."""


@dataclass(frozen=True)
class Looked:
    """What was found, and at which steps."""

    findings: Findings
    steps: tuple[int, ...]
    """The steps looked at, counted from 1."""
    skipped: tuple[int, ...]
    """Those of them that the run skipped, because a gradient overflowed."""
    ended: str | None
    """Why the run ended before the last of them; None where it did not."""


def steps_to_look_at(chosen: Plan, settings: NumericsSettings) -> list[int]:
    """Which steps are looked at, evenly spread behind the warm-up.

    Raises:
        UsageError: the run has no step behind the warm-up.
    """
    per_epoch = -(-len(chosen.splits.train) // chosen.batch.effective)
    planned = chosen.limits.planned_steps(per_epoch)
    last = settings.span if planned is None else min(settings.span, planned)
    first = settings.warmup + 1
    if first > last:
        raise UsageError(
            f"numerics.warmup={settings.warmup} leaves none of {last} steps to look at; legal is "
            f"at most {last - 1}, or a longer run (train.max_steps, train.epochs, numerics.span)"
        )
    count = min(settings.steps, last - first + 1)
    if count == 1:
        return [last]
    return [first + round(i * (last - first) / (count - 1)) for i in range(count)]


def look(
    chosen: Plan,
    settings: NumericsSettings,
    stop: Callable[[], bool],
    tell: Callable[[str], None] = lambda text: None,
) -> Looked:
    """Train, and look at some steps.

    Args:
        chosen: the run.
        settings: which steps, and what is asked of them.
        stop: asked after each step whether to end.
        tell: is told in words of each step that was looked at.

    Raises:
        RunFailedError: the run failed before the first of them.
        StopRequestedError: `stop` said so before the first of them.
    """
    steps = steps_to_look_at(chosen, settings)
    none = chosen.splits.train.first(0)  # nothing is evaluated on the way
    parts = build_parts(replace(chosen, splits=replace(chosen.splits, validation=none, test=none)))
    looker = _Looker(chosen, settings, parts)
    limits = Limits(None, steps[-1], chosen.limits.max_time_s)
    trainer = _Trainer(parts, limits, stop, looker, steps, tell)
    ended = None
    try:
        trainer.fit()
    except StopRequestedError:
        if not looker.steps:
            raise
        ended = f"stopped at step {trainer.step}"
    except RunFailedError as error:
        if not looker.steps:
            raise
        ended = str(error)
    if not looker.steps:
        raise RunFailedError(
            f"train.max_time_s={chosen.limits.max_time_s:g} ended the run before step {steps[0]}, "
            "the first to look at"
        )
    return Looked(looker.findings(), tuple(looker.steps), tuple(looker.skipped), ended)


class _Trainer(Trainer):
    """The loop, with a look at some of its steps."""

    def __init__(
        self,
        parts: Parts,
        limits: Limits,
        stop: Callable[[], bool],
        looker: _Looker,
        steps: Sequence[int],
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(parts, limits, NoObserver(), stop)
        self._looker, self._steps, self._tell = looker, steps, tell

    def optimizer_step(self, batch: Batch) -> StepResult:
        number = self.step + 1
        if number not in self._steps:
            return super().optimizer_step(batch)
        self._flush()  # a loss that broke a few steps ago ends the run before it is looked at
        self._looker.before(batch)
        with self._looker.held.watching():
            result = super().optimizer_step(batch)
        self._looker.after(number, result)
        done, last = len(self._looker.steps), self._steps[-1]
        self._tell(f"looked at step {number} of {last}, {done} of {len(self._steps)}")
        return result


class _Looker:
    """Looks at steps before and while the run takes them."""

    def __init__(self, chosen: Plan, settings: NumericsSettings, parts: Parts) -> None:
        self.steps: list[int] = []
        self.skipped: list[int] = []
        self._settings, self._run = settings, parts.model
        self._kind = parts.precision.loss_scale.kind
        self.held = Statistics(
            parts.model, parts.optimizer, parts.precision.loss_scale, FROM_THE_RUN
        )
        self._exact_probe = Probe(chosen, shipped_policy(EXACT))
        self._fp16_probe = Probe(chosen, as_planned_in(chosen, "fp16"))
        self._bf16_probe = Probe(chosen, as_planned_in(chosen, "bf16"))
        self._exact = Statistics(self._exact_probe.model, formats=("activations", *GRADIENTS))
        self._largest: list[tuple[float, str]] = []
        self._rounding = RoundingErrors()
        self._reference = FLOAT64
        self._true = Statistics(self._exact_probe.model, formats=(), kinds=ROWS_BY_POWER)
        """Gradients of what `_rounding` is told of, of which it sees no parameters."""
        self._passes = {name: Deviations() for name in FORMATS}
        self._unavoidable = {name: Deviations() for name in FORMATS}
        self._tried: dict[float, Deviations] = {}
        self._variances: dict[str, float] | None = None
        self._deviation = 0.0

    def before(self, batch: Batch) -> None:
        """The run takes its next step on this batch."""
        self._exact.largest.found.clear()
        with self._exact.watching():
            exact = self._exact_probe.gradients(self._run, batch)
        loss = self._exact_probe.loss
        self._find_rounding(exact, loss, batch)
        self._find_spread(batch)
        for name, dtype in FORMATS.items():
            rounded = self._moved(torch.finfo(dtype).eps / 2, OWN_SEED)
            found = errors(exact, self._exact_probe.gradients(self._run, batch, inside=rounded))
            self._unavoidable[name].add(found, self._exact_probe.loss, loss)
        low = self._bf16_probe.gradients(self._run, batch)
        found = errors(exact, low, self._variances)
        self._passes["bf16"].add(found, self._bf16_probe.loss, loss, self._deviation)
        scale = self._fitting(batch)
        found = self._at(scale, exact, batch)
        self._passes["fp16"].add(found, self._fp16_probe.loss, loss, self._deviation, scale)
        if self._settings.try_scales:
            self._try(scale, exact, batch, loss)

    def _find_spread(self, batch: Batch) -> None:
        """What loss and gradients differ by from batch to batch, from the halves of this one.

        Nothing is known of a batch that is too small to be cut.
        """
        self._variances, self._deviation = None, 0.0
        half = batch.size // 2
        if half < LEAST_HALF:
            return
        gradients, losses = [], []
        for rows in (slice(0, half), slice(half, 2 * half)):
            part = Batch(batch.inputs[rows], batch.targets[rows], half)
            gradients.append(self._exact_probe.gradients(self._run, part))
            losses.append(self._exact_probe.loss)
        self._variances, self._deviation = variances(gradients), abs(losses[0] - losses[1]) / 2

    def _find_rounding(self, float32: Mapping[str, Tensor], loss: float, batch: Batch) -> None:
        """Compare gradients with those of float64, or of moved weights where there are none."""
        if self._reference is FLOAT64:
            try:
                with self._true.watching():
                    exact = self._exact_probe.gradients(self._run, batch, inside=in_float64)
                reason = other_loss(loss, self._exact_probe.loss)
            except Exception as error:  # whatever a model's own code does not do in float64
                reason = first_line(error)
            if not reason:
                self._rounding.add(float32, exact)
                return
            self._reference = Reference(MOVED, reason)
        moves = [
            self._exact_probe.gradients(self._run, batch, inside=self._moved(MOVE, OWN_SEED + n))
            for n in range(MOVES)
        ]
        self._rounding.add(float32, float32, moves)

    def _moved(self, most: float, seed: int) -> Callable[[nn.Module], AbstractContextManager[None]]:
        return lambda model: changed(list(model.parameters()), most, seed)

    def _unjudged_rows(self) -> frozenset[tuple[str, str]]:
        """Rows of gradients by activations that are rounding errors too."""
        if self._reference is not FLOAT64:
            return frozenset()
        return frozenset(
            key
            for key, row in self._true.rows.items()
            if is_rounding(self._exact.rows[key].noise.signal, row.noise.signal)
        )

    def after(self, number: int, result: StepResult) -> None:
        """It has taken it."""
        self.steps.append(number)
        if result.skipped is not None and result.skipped.item():
            self.skipped.append(number)

    def findings(self) -> Findings:
        """What all of it comes to."""
        largest, where = max(self._largest)
        unjudged = (*self._rounding.undetermined, *self._rounding.zero)

        def standing(name: str) -> Standing:
            passes, rounded = self._passes[name], self._unavoidable[name]
            return Standing.of(passes, rounded, unjudged, self._settings.needed_db)

        return Findings(
            exact=self._exact,
            held=self.held,
            largest=largest,
            where=where,
            fp16=standing("fp16"),
            bf16=standing("bf16"),
            tried={scale: found.errors(unjudged) for scale, found in sorted(self._tried.items())},
            undetermined=self._rounding.undetermined,
            zero=self._rounding.zero,
            reference=self._reference,
            unjudged_rows=self._unjudged_rows(),
            scale_kind=self._kind,
            headroom=self._settings.headroom,
            needed_db=self._settings.needed_db,
        )

    def _at(self, scale: float, exact: Mapping[str, Tensor], batch: Batch) -> Errors:
        low = self._fp16_probe.gradients(self._run, batch, scale)
        return errors(exact, low, self._variances)

    def _fitting(self, batch: Batch) -> float:
        """The loss scale for this step alone; notes what the largest gradient is."""
        size, place = self._exact.largest.worst()
        scale = self._scale_for(size)
        for _ in range(ATTEMPTS):
            seen = LargestGradients(lambda scale=scale: scale)  # type: ignore[misc]
            with seen.following(self._fp16_probe.model):
                self._fp16_probe.gradients(self._run, batch, scale, seen)
            if not math.isfinite(self._fp16_probe.loss):
                break  # it overflows on the way there, at any loss scale
            found, where = seen.worst()
            if math.isfinite(found):
                size, place = found, where
                break
            scale /= LOWER
        self._largest.append((size, str(place)))
        return self._scale_for(size)

    def _scale_for(self, size: float) -> float:
        if not 0 < size < math.inf:
            return 1.0
        return largest_power(FP16.largest / self._settings.headroom / size)

    def _try(self, scale: float, exact: Mapping[str, Tensor], batch: Batch, loss: float) -> None:
        if not self._tried:  # the powers are those around the first step's
            middle = round(math.log2(scale))
            powers = range(min(0, middle - BELOW), middle + ABOVE + 1)
            self._tried = {2.0**n: Deviations() for n in powers}
        for tried, found in self._tried.items():
            gradients = self._at(tried, exact, batch)
            found.add(gradients, self._fp16_probe.loss, loss, scale=tried)
