"""The numerics of some steps of a plan's run: of the run itself, and of passes beside it.

Each inspected step is taken several times from the same weights on the same samples:

    exact       in float32, for the true size of everything; and once more in float64, for which of
                its gradients are rounding errors (mprun/watch/updates.py)
    rounded     in float32 from weights of each 16-bit format's precision, for their effect alone
    float16     at a loss scale that fits this step, from the exact pass: the error of its
                gradients, and the largest number that float16 has to represent
    bfloat16    the error of its gradients
    the run's   as configured; this one alone moves the weights
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor, nn

from mprun.config import compose
from mprun.errors import EXIT_FAILED, RunFailedError, UsageError
from mprun.inspect.collect import GRADIENTS, LargestGradients, Statistics
from mprun.inspect.float32_check import Region, float32_loss, is_good_enough
from mprun.inspect.histograms import largest_power
from mprun.inspect.measurements import (
    FROM_THE_RUN,
    ROWS_BY_POWER,
    Measurements,
    gradient_errors,
    variances_of_halves,
)
from mprun.inspect.numerics import (
    SCHEMA_VERSION,
    NumericsResult,
    NumericsSettings,
    QuantityError,
    answer_sentence,
    numerics_parts,
)
from mprun.inspect.passes import in_float64
from mprun.inspect.quantity_errors import exact_values, quantity_errors
from mprun.inspect.question import Given, Measuring, Prepared, of_run
from mprun.precision.formats import BY_NAME, FP16
from mprun.precision.policy import policy
from mprun.records.console import ReportPart, report_nothing
from mprun.records.result import Result
from mprun.study.planned_run import FLOAT32_MODE, PlannedRun, PolicyProbe, plan_run, policy_in
from mprun.train.assemble.parts import build_parts
from mprun.train.assemble.plan import Plan
from mprun.train.assemble.quantity_probe import in_policy
from mprun.train.data import Batch
from mprun.train.data.batches import halves
from mprun.train.loop import Limits, StepResult, StopRequestedError, Trainer, TrainingComponents
from mprun.watch.updates import DTYPES, OWN_SEED, weights_moved

# How often the loss scale is lowered, by `LOWER` each time, where float16 overflows at it
ATTEMPTS = 6
LOWER = 16.0
MIN_HALF = 2  # Samples in half a batch: batch normalisation takes no fewer
# Without `numerics.steps`: the steps, those where time is short, and when it is
STEPS, FEWEST, LONGEST_S = 20, 5, 35.0


@dataclass(frozen=True)
class InspectedSteps:
    """The results of some steps of a run."""

    result: NumericsResult
    steps: tuple[int, ...]  # The inspected steps, counted from 1
    skipped: tuple[int, ...]  # Those of them that the run skipped, because a gradient overflowed
    ended: str | None  # Why the run ended before the last of them; None if it did not


def steps_to_inspect(plan: Plan, settings: NumericsSettings) -> list[int]:
    """The numbers of the steps to inspect, evenly spread after the warm-up.

    Raises:
        UsageError: the run has no step after the warm-up.
    """
    planned = plan.planned_steps
    last = settings.span if planned is None else min(settings.span, planned)
    first = settings.warmup + 1
    if first > last:
        raise UsageError(
            f"numerics.warmup={settings.warmup} leaves none of {last} steps to inspect; legal is "
            f"at most {last - 1}, or a longer run (train.max_steps, train.epochs, numerics.span)"
        )
    return _spread(range(first, last + 1), settings.steps or STEPS)


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spread, with the first and the last."""
    count = min(count, len(steps))
    if count == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def inspect_steps(
    plan: Plan,
    settings: NumericsSettings,
    stop: Callable[[], bool],
    report: ReportPart = report_nothing,
) -> InspectedSteps:
    """Train, and inspect some steps; after each, `stop` is asked whether to end.

    Raises:
        RunFailedError: the run failed before the first of them.
        StopRequestedError: `stop` ended the run before the first of them.
    """
    steps = steps_to_inspect(plan, settings)
    none = plan.splits.train.first(0)  # no samples: nothing is evaluated between the steps
    parts = build_parts(replace(plan, splits=replace(plan.splits, validation=none, test=none)))
    inspector = _StepInspector(plan, settings, parts)
    limits = Limits(None, steps[-1], plan.limits.max_time_s)  # no step after the last inspected
    few = settings.steps is None
    trainer = _InspectingTrainer(parts, limits, stop, inspector, steps, report, few)
    ended = None
    try:
        trainer.fit()
    except StopRequestedError:
        if not inspector.steps:
            raise
        ended = f"stopped at step {trainer.step}"
    except RunFailedError as error:
        if not inspector.steps:
            raise
        ended = str(error)
    if not inspector.steps:
        raise RunFailedError(
            f"train.max_time_s={plan.limits.max_time_s:g} ended the run before step {steps[0]}, "
            "the first to inspect"
        )
    result = replace(inspector.measured.result(), quantities=inspector.quantities(trainer.step))
    return InspectedSteps(result, tuple(inspector.steps), tuple(inspector.skipped), ended)


def prepare(given: Given) -> Prepared:
    """Plan the run, and check that it has steps to inspect."""
    planned = plan_run(compose(given.overrides, given.config_dir), "numerics")
    settings, verbose = given.settings(NumericsSettings), given.options.verbose
    steps_to_inspect(planned.plan, settings)  # raises before a folder is made
    return of_run(planned, lambda m: recipe_numerics(planned, settings, m, verbose))


def recipe_numerics(
    planned: PlannedRun, settings: NumericsSettings, measuring: Measuring, verbose: bool
) -> Result:
    """Train a planned run and inspect some steps.

    Raises:
        RunFailedError: the run failed before the first of them.
        SignalReceivedError: a signal ended it before the first of them.
    """
    stop = measuring.stop
    with planned.executing(), stop.deferred():  # a signal ends the run after a step, with results
        inspected = inspect_steps(planned.plan, settings, stop.requested, measuring.report)
    content = {
        "schema_version": SCHEMA_VERSION,
        **planned.described(
            *("recipe", "seed", "precision", "variant", "effective", "execution"),
            *("data", "batch", "hardware", "versions"),
        ),
        "steps": list(inspected.steps),
        "skipped": list(inspected.skipped),
        "ended": inspected.ended,
        **msgspec.to_builtins(inspected.result, str_keys=True),
    }
    files: dict[str, str | bytes] = {"numerics.json": Result(content).json}
    if settings.plots:
        from mprun.inspect.measurement_plots import numerics_plot  # imports matplotlib

        data = content["data"]
        title = f"{content['recipe']} in {content['variant']}, {data['name']} ({data['source']}), "
        title += f"{len(inspected.steps)} steps measured"
        files |= numerics_plot(inspected.result, title)
    steps, skipped = inspected.steps, len(inspected.skipped)
    left_out = f", {skipped} skipped" if skipped else ""
    text = f"inspected {len(steps)} of {steps[-1]} steps{left_out}"
    more = f"; all figures by mprun show {shlex.quote(str(measuring.folder))} --verbose"
    parts = [*numerics_parts(inspected.result, settings.top, verbose)]
    parts.append(text if verbose else text + more)
    if inspected.ended is None:
        return Result(content, parts, files)
    warning = f"the run ended early, its results are above: {inspected.ended}"
    status = stop.exit_status if stop.requested() else EXIT_FAILED
    return Result(content, parts, files, [warning], status)


class _InspectingTrainer(Trainer):
    """The training loop, with an inspection of some of its steps."""

    def __init__(
        self,
        parts: TrainingComponents,
        limits: Limits,
        stop: Callable[[], bool],
        inspector: _StepInspector,
        steps: Sequence[int],
        report: ReportPart,
        few: bool,
    ) -> None:
        super().__init__(parts, limits, stop=stop)
        self._inspector, self._steps, self._report = inspector, steps, report
        self._few, self._began_s = few, time.monotonic()

    def optimizer_step(self, batch: Batch) -> StepResult:
        number, began_s = self.step + 1, time.monotonic()
        if number not in self._steps:
            return super().optimizer_step(batch)
        self._flush()  # a loss that broke a few steps ago ends the run before the inspection
        done, last = len(self._inspector.steps), self._steps[-1]
        measured = replace(self._inspector.measured)  # a copy: it keeps what it computed
        so_far = f"; so far: {answer_sentence(measured.result())}" if done else ""
        self._report(f"inspecting step {number} of {last}{so_far}", done, len(self._steps))
        self._inspector.before(batch)
        self.parts.clock.start()  # the step begins now: the flush ended the clock's last one
        with self._inspector.measured.of_run.watching():
            result = super().optimizer_step(batch)
        self._inspector.after(number, result)
        if self._few and not done:
            now_s = time.monotonic()
            ordinary_s = (last - number) * (began_s - self._began_s) / max(1, number - 1)
            room_s = LONGEST_S - (now_s - self._began_s) - ordinary_s
            self._steps = _spread(self._steps, max(FEWEST, 1 + int(room_s / (now_s - began_s))))
        return result


class _StepInspector:
    """Measures steps before and while the run takes them."""

    def __init__(self, plan: Plan, settings: NumericsSettings, parts: TrainingComponents) -> None:
        self.steps: list[int] = []
        self.skipped: list[int] = []
        self._plan, self._settings, self._run = plan, settings, parts.model
        self._exact_probe = PolicyProbe(plan, policy(FLOAT32_MODE))
        self._fp16_probe = PolicyProbe(plan, policy_in(plan, "fp16"))
        self._bf16_probe = PolicyProbe(plan, policy_in(plan, "bf16"))
        model, loss_scale = self._exact_probe.model, parts.precision.loss_scale
        further = [BY_NAME[name] for name in settings.formats]
        formats = ("activations", *GRADIENTS)
        self.measured = Measurements(
            settings,
            loss_scale.kind,
            Statistics(parts.model, parts.optimizer, loss_scale, FROM_THE_RUN, further=further),
            exact=Statistics(model, formats=formats, further=further),
            float64=Statistics(model, formats=(), kinds=ROWS_BY_POWER),
        )
        self._variances: dict[str, float] | None = None
        self._deviation = 0.0

    def before(self, batch: Batch) -> None:
        """The run takes its next step on this batch."""
        seen = self.measured
        seen.exact.largest.magnitudes.clear()  # the fitting loss scale is that of each step alone
        with seen.exact.watching():
            exact = self._exact_gradients(batch)
        loss = self._exact_probe.loss
        seen.rounding.compare(
            exact,
            loss,
            lambda: self._in_float64(batch),
            lambda most, seed: self._with_moved_weights(batch, most, seed),
            lambda float64: self._is_same(batch, loss, float64),
        )
        self._measure_spread(batch)
        for name, dtype in DTYPES.items():
            # eps / 2 is the largest relative error of rounding to nearest
            rounded = self._with_moved_weights(batch, torch.finfo(dtype).eps / 2, OWN_SEED)
            errors = gradient_errors(exact, rounded)
            seen.unavoidable[name].add(errors, self._exact_probe.loss, loss)
        low = self._bf16_probe.gradients(self._run, batch)
        errors = gradient_errors(exact, low, self._variances)
        seen.passes["bf16"].add(errors, self._bf16_probe.loss, loss, self._deviation)
        scale, low = self._in_fitting_scale(batch)
        errors = gradient_errors(exact, low, self._variances)
        seen.passes["fp16"].add(errors, self._fp16_probe.loss, loss, self._deviation, scale)

    def after(self, number: int, result: StepResult) -> None:
        """The run has taken step `number`."""
        self.steps.append(number)
        if result.skipped is not None and result.skipped.item():
            self.skipped.append(number)

    def quantities(self, steps: int) -> list[QuantityError]:
        """The errors of the recipe's quantities by the run's weights, after so many steps."""
        formats = {short: policy_in(self._plan, short) for short in ("fp16", "bf16")}
        named = {FLOAT32_MODE: policy(FLOAT32_MODE), **formats}
        plans = {name: in_policy(self._plan, row) for name, row in named.items()}
        plans = {self._plan.policy.name: self._plan, **plans}
        weights = self._run.state_dict()
        return quantity_errors(exact_values(self._plan, weights, steps), weights, plans, steps)

    def _exact_gradients(
        self,
        batch: Batch,
        inside: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
    ) -> dict[str, Tensor]:
        return self._exact_probe.gradients(self._run, batch, inside=inside)

    def _in_float64(self, batch: Batch) -> tuple[float, Mapping[str, Tensor]]:
        with self.measured.float64.watching():
            exact = self._exact_gradients(batch, in_float64)
        return self._exact_probe.loss, exact

    def _is_same(self, batch: Batch, loss: float, float64: float) -> bool:
        """Whether float64 computes the same as float32; if so, how inexact float32 is."""

        def run(inside: Region) -> float:
            self._exact_gradients(batch, inside)
            return self._exact_probe.loss

        if self.measured.float32 is not None:  # two recorded passes are slow: one step is enough
            return True
        result = float32_loss(loss, float64, run)
        if result is not None and not is_good_enough(result):
            self.measured.float32 = result
        return result is not None

    def _with_moved_weights(self, batch: Batch, most: float, seed: int) -> Mapping[str, Tensor]:
        return self._exact_gradients(
            batch, lambda model: weights_moved(list(model.parameters()), most, seed)
        )

    def _measure_spread(self, batch: Batch) -> None:
        """Loss and gradients of the halves of a batch, for their spread between batches.

        The spread is unknown if a batch is too small to be cut.
        """
        self._variances, self._deviation = None, 0.0
        parts = halves(batch)
        if parts is None or parts[0].size < MIN_HALF:
            return
        gradients, losses = [], []
        for part in parts:
            gradients.append(self._exact_gradients(part))
            losses.append(self._exact_probe.loss)
        self._variances = variances_of_halves(gradients)
        # the standard deviation of a half is sqrt(2) of the batch's, that of their difference 2
        self._deviation = abs(losses[0] - losses[1]) / 2

    def _in_fitting_scale(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """The loss scale for this step alone, and float16's gradients; notes the largest, too."""
        size, place = self.measured.exact.largest.worst()
        scale = self._scale_for(size)
        for _ in range(ATTEMPTS):
            largest = LargestGradients(lambda scale=scale: scale)  # type: ignore[misc]
            with largest.following(self._fp16_probe.model):
                low = self._fp16_probe.gradients(self._run, batch, scale, largest.follow)
            if not math.isfinite(self._fp16_probe.loss):
                break  # the forward pass overflows, at any loss scale
            low_size, low_place = largest.worst()
            if math.isfinite(low_size):
                size, place = low_size, low_place
                break
            scale /= LOWER  # it overflowed: float16 computes numbers that float32's pass has not
        self.measured.largest.append((size, str(place)))
        fitting = self._scale_for(size)
        if fitting != scale:
            low = self._fp16_probe.gradients(self._run, batch, fitting)
        return fitting, low

    def _scale_for(self, size: float) -> float:
        if not 0 < size < math.inf:
            return 1.0
        return largest_power(FP16.largest / self._settings.headroom / size)
