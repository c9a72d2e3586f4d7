"""Statistics of some steps of a plan's run: looked at in the run, and beside it.

Each step looked at is taken several times from the same weights on the same samples:

    exact       in float32, for the true size of everything; and once more with the weights moved by
                a float32 unit, for which gradients float32 itself determines
    float16     at a loss scale that fits this step, found from the exact pass: how far its
                gradients are off, and what the largest number is that float16 had to hold
    bfloat16    how far its gradients are off
    the run's   as asked for, which alone moves the weights
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mprun.build.parts import build_parts
from mprun.build.plan import Plan
from mprun.build.probe import EXACT, Probe, as_planned_in, shipped_policy
from mprun.config.settings import NumericsSettings
from mprun.data import Batch
from mprun.errors import RunFailedError, UsageError
from mprun.numerics.collect import GRADIENTS, Statistics
from mprun.numerics.findings import FROM_THE_RUN, Findings
from mprun.numerics.formats import FP16
from mprun.numerics.gradients import LargestGradients
from mprun.numerics.loss_scale import largest_power
from mprun.numerics.verdicts import Errors, errors, typical_errors, undetermined
from mprun.observer import NoObserver
from mprun.runner import Limits, Parts, StepResult, StopRequestedError, Trainer

ATTEMPTS = 6
"""How often the loss scale is lowered, by `LOWER` each time, where float16 overflows at it."""
LOWER = 16.0
UNIT = 2.0**-23
"""float32's, relative to a number: what weights are moved by to see what float32 determines."""
BELOW, ABOVE = 20, 8
"""How many powers of two on each side of a fitting loss scale are tried."""


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
    per_epoch = -(-len(chosen.splits.train) // chosen.batch["effective"])
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
        self._fp16: list[Errors] = []
        self._bf16: list[Errors] = []
        self._undetermined: Counter[str] = Counter()
        self._tried: dict[float, list[Errors]] = {}

    def before(self, batch: Batch) -> None:
        """The run takes its next step on this batch."""
        self._exact.largest.found.clear()
        with self._exact.watching():
            exact = self._exact_probe.gradients(self._run, batch)
        jittered = self._exact_probe.gradients(self._run, batch, jitter=UNIT)
        noise = undetermined(exact, jittered, self._settings.needed_db)
        self._undetermined.update(noise)
        exact = {name: gradient for name, gradient in exact.items() if name not in noise}
        self._bf16.append(errors(exact, self._bf16_probe.gradients(self._run, batch)))
        scale = self._fitting(exact, batch)
        self._fp16.append(self._at(scale, exact, batch))
        if self._settings.try_scales:
            self._try(scale, exact, batch)

    def after(self, number: int, result: StepResult) -> None:
        """It has taken it."""
        self.steps.append(number)
        if result.skipped is not None and result.skipped.item():
            self.skipped.append(number)

    def findings(self) -> Findings:
        """What all of it comes to."""
        (largest, where), steps = max(self._largest), len(self._largest)
        return Findings(
            exact=self._exact,
            held=self.held,
            largest=largest,
            where=where,
            fp16=typical_errors(self._fp16),
            bf16=typical_errors(self._bf16),
            tried={scale: typical_errors(found) for scale, found in sorted(self._tried.items())},
            undetermined=frozenset(p for p, n in self._undetermined.items() if n > steps / 2),
            scale_kind=self._kind,
            headroom=self._settings.headroom,
            needed_db=self._settings.needed_db,
        )

    def _at(self, scale: float, exact: dict[str, Tensor], batch: Batch) -> Errors:
        return errors(exact, self._fp16_probe.gradients(self._run, batch, scale))

    def _fitting(self, exact: dict[str, Tensor], batch: Batch) -> float:
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

    def _try(self, scale: float, exact: dict[str, Tensor], batch: Batch) -> None:
        if not self._tried:  # the powers are those around the first step's
            middle = round(math.log2(scale))
            powers = range(min(0, middle - BELOW), middle + ABOVE + 1)
            self._tried = {2.0**n: [] for n in powers}
        for tried, found in self._tried.items():
            found.append(self._at(tried, exact, batch))
