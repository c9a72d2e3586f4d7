"""The results of `mprun numerics`: what `numerics.json` records, and which 16-bit format is enough.

Activations and gradients are those of the exact passes, in float32 and unscaled; weights and
updates those of the run. Shares are of the values that are not zero: a zero in the exact pass is
structural (an inactive ReLU, padding), and no format loses it.

float16 has 11 significand bits and 30 normal exponents, bfloat16 8 and 254. A model that exceeds
float16's exponents needs *range*, one that 8 bits are too few for needs *precision*
(`range_or_precision`). Both appear as noise, so one criterion (`tolerance.py`) on loss and weight
gradients of whole passes separates them. The verdict on one tensor is about rounding its values:
that alone rarely leaves less than 50 dB in bfloat16, but it adds up through a model and grows where
numbers cancel. If the passes in a format are fine, a tensor's rounding error does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from torch import Tensor

from mprun.inspect.collect import GRADIENTS, LayerStatistics, Statistics
from mprun.inspect.histograms import (
    PUBLISHED,
    LayerGradients,
    ScaleAdvice,
    expected_db,
    judge,
    need,
    recommend,
)
from mprun.inspect.numerics import (
    KINDS,
    LONG,
    Float32Loss,
    FormatResult,
    HeldValues,
    Histogram,
    LossScaledRow,
    LossScaleResult,
    LostUpdatesResult,
    ModelVerdict,
    NumericsResult,
    NumericsRow,
    NumericsSettings,
    RangeShares,
    ScaleVerdict,
    pass_sentences,
)
from mprun.inspect.tolerance import NEEDED_DB, Deviation, Tolerance, gradient_error, loss_shares
from mprun.precision.formats import BF16, FP16, Format
from mprun.precision.policy import dtype_name
from mprun.precision.rounding import ratio_db
from mprun.watch.updates import DTYPES, FLOAT64, LostUpdates, RoundingErrors, is_rounding, power

EITHER, FP32 = "either", "needs fp32"
RANGE, PRECISION = "needs range: bf16", "needs precision: fp16"


def range_or_precision(fp16: bool, bf16: bool) -> str:
    """The verdict, from whether each of the two formats suffices."""
    if bf16:
        return EITHER if fp16 else RANGE
    return PRECISION if fp16 else FP32


@dataclass(frozen=True)
class GradientErrors:
    """The errors of some gradients, parameter by parameter."""

    ratios: Mapping[str, float]
    """Parameter to noise power over signal power; infinite where a gradient is not finite."""
    beyond: Mapping[str, float] = field(default_factory=dict)
    """The same of noise beyond the difference between batches (`tolerance.py`)."""

    @property
    def mean(self) -> float:
        """The mean ratio: every parameter counts the same, whatever the size of its gradient."""
        return sum(self.ratios.values()) / len(self.ratios) if self.ratios else 0.0

    @property
    def db(self) -> float:
        """The mean as a signal-to-noise ratio."""
        return ratio_db(1.0, self.mean)

    def db_of(self, name: str) -> float:
        """The signal-to-noise ratio of one parameter."""
        return ratio_db(1.0, self.ratios[name])


def gradient_errors(
    exact: Mapping[str, Tensor],
    low: Mapping[str, Tensor],
    variances: Mapping[str, float] | None = None,
) -> GradientErrors:
    """Compare gradients, in float64.

    Parameters whose exact gradient is 0 are left out, unless the other one is not finite.

    Args:
        exact: parameter to gradient.
        low: gradients of these parameters at least, unscaled.
        variances: parameter to the power of the difference of exact gradients between batches.
    """
    ratios, beyond = {}, {}
    for name, gradient in exact.items():
        true, other = gradient.double(), low[name].double()
        signal, noise = power(true), power(other - true)
        if not math.isfinite(noise):  # counts even where the exact gradient is 0
            ratios[name] = beyond[name] = math.inf
        elif signal:
            variance = 0.0 if variances is None else variances[name]
            product = float((true * other).sum())
            ratios[name] = noise / signal
            beyond[name] = gradient_error(noise, signal, product, variance) / signal
    return GradientErrors(ratios, beyond)


def variances_of_halves(halves: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The variance of a batch's gradients between batches, from gradients of its two halves.

    Those are of the mean loss over each half, by parameter.
    """
    first, second = halves
    # halves have twice the variance, their difference four times that of the whole batch
    return {name: power(first[name].double() - second[name].double()) / 4 for name in first}


def typical_errors(steps: Iterable[GradientErrors]) -> GradientErrors:
    """The median over steps, parameter by parameter; infinite where any step's is.

    Not the mean: now and then, rounding turns a ReLU on or off that lies at 0, or makes a pooling
    take another of two equal values. The gradients of that step are then off by as much as if a
    sample had been left out, in every format, and would dominate the mean.
    """
    errors = list(steps)

    def typical(rows: list[Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row[name] for row in rows if name in row] for name in names}
        return {n: math.inf if math.inf in x else median(x) for n, x in columns.items()}

    return GradientErrors(typical([x.ratios for x in errors]), typical([x.beyond for x in errors]))


class FormatPasses:
    """How far passes in one format were from float32's, over some steps."""

    def __init__(self) -> None:
        self._steps: list[GradientErrors] = []
        self._change = self._whole = self._squares = 0.0
        self._scale = math.inf  # before the first step; the lowest scale of all steps follows

    def add(
        self,
        gradients: GradientErrors,
        loss: float,
        float32: float,
        deviation: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """Add a step; `deviation` estimates the loss's standard deviation between batches."""
        self._steps.append(gradients)
        self._change += abs(loss - float32)  # summed first: a loss near 0 is no large share
        self._whole += abs(float32)
        self._squares += deviation**2
        self._scale = min(self._scale, scale)

    def errors(self, unjudged: Collection[str] = ()) -> GradientErrors:
        """The typical errors of parameters; of unjudged ones only those that are not finite."""
        typical = typical_errors(self._steps)
        counted = {n for n, r in typical.ratios.items() if n not in unjudged or r == math.inf}
        ratios, beyond = (
            {n: r for n, r in x.items() if n in counted} for x in (typical.ratios, typical.beyond)
        )
        return GradientErrors(ratios, beyond)

    def measure(self, unjudged: Collection[str] = ()) -> Deviation:
        """Loss and gradients of all steps against float32's."""
        errors = self.errors(unjudged)
        worst_db, worst = _worst(errors.ratios)
        beyond_db, where = _worst(errors.beyond)
        deviation = math.sqrt(len(self._steps) * self._squares)  # the root mean square, each step
        loss, beyond = loss_shares(self._change, self._whole, deviation)
        return Deviation(
            loss, errors.db, worst_db, worst, self._scale, "", beyond, beyond_db, where
        )


def _worst(ratios: Mapping[str, float]) -> tuple[float, str]:
    """The lowest signal-to-noise ratio in dB, and the parameter that has it."""
    name = max(ratios, key=lambda name: ratios[name], default="")
    return (ratio_db(1.0, ratios[name]), name) if name else (math.inf, "")


@dataclass(frozen=True)
class FormatVerdict:
    """Whether a format suffices."""

    errors: GradientErrors  # The errors of the parameters that are judged
    measure: Deviation
    unavoidable: Deviation  # The same with nothing but weights of the format's precision
    tolerance: Tolerance

    @classmethod
    def of(
        cls,
        passes: FormatPasses,
        unavoidable: FormatPasses,
        unjudged: Collection[str],
        needed_db: float = NEEDED_DB,
    ) -> FormatVerdict:
        """The verdict of some steps."""
        alone = unavoidable.measure(unjudged)
        tolerance = Tolerance(gradient_db=needed_db).beside(alone)
        return cls(passes.errors(unjudged), passes.measure(unjudged), alone, tolerance)

    @property
    def within_tolerance(self) -> bool:
        """Whether loss and gradients keep to the tolerance."""
        return self.tolerance.harm(self.measure) <= 1

    @property
    def loss_within_tolerance(self) -> bool:
        """Whether the loss keeps to the tolerance; NaN does not."""
        return self.measure.judged_loss <= self.tolerance.loss  # not `not >`: NaN is False here

    def parameter_will_do(self, name: str) -> bool:
        """Whether a parameter's gradient keeps to the tolerance; one that is not judged does."""
        needed, ratio = self.tolerance.gradient_db, self.errors.beyond.get(name, 0.0)
        return needed is None or ratio_db(1.0, ratio) >= needed


# Kinds of which the run has the exact values; passes beside it share its weights, and update none
FROM_THE_RUN = ("weights", "updates")
# Kinds whose rounding errors are recognised by their power: there are no tensors to compare
ROWS_BY_POWER = ("activation_gradients",)


def _passes() -> dict[str, FormatPasses]:
    return {name: FormatPasses() for name in DTYPES}


@dataclass
class Measurements:
    """What is measured in some steps, and the results of it."""

    settings: NumericsSettings
    scale_kind: str  # none, static or dynamic
    of_run: Statistics  # Statistics of the run
    exact: Statistics  # Statistics of the passes in float32
    float64: Statistics  # Of the passes in float64: `ROWS_BY_POWER`, without formats
    largest: list[tuple[float, str]] = field(default_factory=list)
    """The largest gradient of each step that float16 has to represent, unscaled, and its place."""
    passes: dict[str, FormatPasses] = field(default_factory=_passes)
    """fp16, at a loss scale that fits the step, and bf16."""
    unavoidable: dict[str, FormatPasses] = field(default_factory=_passes)
    """The same with nothing but weights of the format's precision."""
    rounding: RoundingErrors = field(default_factory=RoundingErrors)
    """Which gradients are rounding errors, or zero, in float32 already: they decide nothing."""
    float32: Float32Loss | None = None  # A step in which float32 itself was not good enough

    @cached_property
    def _formats(self) -> dict[str, FormatVerdict]:
        unjudged = (*self.rounding.undetermined, *self.rounding.zero)
        alone, needed_db = self.unavoidable, self.settings.needed_db
        return {
            name: FormatVerdict.of(passes, alone[name], unjudged, needed_db)
            for name, passes in self.passes.items()
        }

    @cached_property
    def advice(self) -> ScaleAdvice | None:
        """The recommended loss scale."""
        rows = self.exact.of(*GRADIENTS)
        layers = {n: (r.histogram, r.noise) for n, r in rows.items() if not self._is_noise(r)}
        return recommend(LayerGradients(*max(self.largest), layers), self.settings.headroom)

    def result(self) -> NumericsResult:
        """Everything that was measured, as recorded; floats may be infinite or NaN."""
        rows = [self._row(row) for row in self._rows()]
        lost = self.of_run.lost
        return NumericsResult(
            verdict=self._verdict(rows),
            loss_scale=self._loss_scale(),
            lost_updates=LostUpdatesResult(
                sum(lost.values(), LostUpdates()).shares(),
                {name: updates.shares() for name, updates in lost.items()},
            ),
            rows=rows,
        )

    def _is_noise(self, row: LayerStatistics) -> bool:
        """Whether a row of gradients is nothing but float32's rounding errors."""
        if row.kind == "weight_gradients":
            return row.name in self.rounding.undetermined
        exact = self.float64.rows.get((row.kind, row.name))
        if exact is None or self.rounding.reference is not FLOAT64:  # nothing to compare with
            return False
        return is_rounding(row.noise.signal, exact.noise.signal)

    @cached_property
    def _in_use(self) -> float | None:
        """The run's last loss scale; None where it has none."""
        return self.of_run.scales[-1] if self.scale_kind != "none" and self.of_run.scales else None

    def _rows(self) -> list[LayerStatistics]:
        """Rows by kind, each kind in the order of the forward pass."""
        sources = {kind: self.of_run if kind in FROM_THE_RUN else self.exact for kind in KINDS}
        rows = [row for kind, source in sources.items() for row in source.of(kind).values()]
        forward = [row.name for row in rows if row.kind in ("weights", "activations")]
        order, kinds = {name: n for n, name in enumerate(forward)}, [*KINDS]
        return sorted(rows, key=lambda r: (kinds.index(r.kind), order.get(r.name, len(order))))

    def _row(self, row: LayerStatistics) -> NumericsRow:
        db = {name: row.noise.db(name) for name in row.noise.noise}
        held = loss_scaled = verdict = None
        if row.kind != "updates":  # no tensor holds updates: they are added, and lost or not
            of_run = self.of_run.rows.get((row.kind, row.name), LayerStatistics(row.kind, row.name))
            held = _held(of_run, row.histogram)
            in_fp16, in_bf16 = db.get("fp16", math.inf), db.get("bf16", math.inf)
            if row.kind in GRADIENTS:
                loss_scaled = self._loss_scaled(row, held.infinite)
                in_fp16 = loss_scaled.fp16_db
            if not self._is_noise(row):
                verdict = range_or_precision(
                    self._suffices("fp16", row, in_fp16), self._suffices("bf16", row, in_bf16)
                )
        return NumericsRow(
            kind=row.kind,
            name=row.name,
            histogram=row.histogram,
            fp16=_shares(row, FP16),
            bf16=_shares(row, BF16),
            sqnr_db=db,
            verdict=verdict,
            held=held,
            loss_scaled=loss_scaled,
        )

    def _suffices(self, name: str, row: LayerStatistics, rounding_db: float) -> bool:
        """Whether a format suffices for a row: always where its passes are fine."""
        format = self._formats[name]
        if format.within_tolerance:
            return True
        is_parameter = row.kind == "weight_gradients"
        by_passes = not is_parameter or format.parameter_will_do(row.name)
        return by_passes and rounding_db >= self.settings.needed_db

    def _loss_scaled(self, row: LayerStatistics, infinite: int) -> LossScaledRow:
        """Gradients in float16 with the recommended loss scale, and with the run's."""
        recommended, in_use = self.advice.scale if self.advice else 1.0, self._in_use
        return LossScaledRow(
            recommended=recommended,
            fp16_db=expected_db(row.histogram, row.noise.signal, FP16, recommended),
            in_use=in_use,
            fp16=None
            if in_use is None
            # frexp has the mantissa in 0.5..1: its exponent is one too large
            else _range_shares(row.histogram, FP16, infinite, math.frexp(in_use)[1] - 1),
        )

    def _verdict(self, rows: Sequence[NumericsRow]) -> ModelVerdict:
        formats = self._formats
        fp16, bf16 = formats["fp16"], formats["bf16"]
        word = range_or_precision(fp16.within_tolerance, bf16.within_tolerance)
        passes = {
            name: FormatResult(f.within_tolerance, f.measure, f.unavoidable, f.tolerance)
            for name, f in formats.items()
        }
        losses = [
            f"the loss in {LONG[n]}" for n, f in formats.items() if not f.loss_within_tolerance
        ]
        others = [
            (f"{r.kind} {r.name}", r.verdict) for r in rows if r.verdict not in (EITHER, None)
        ]
        return ModelVerdict(
            word=word,
            reason="; ".join(map(str.strip, pass_sentences(passes))),
            deciding_rows=[*losses, *(name for name, _ in others)],
            gradients_db={name: f.errors.db for name, f in formats.items()},
            passes=passes,
            parameters_db={
                p: {name: f.errors.db_of(p) for name, f in formats.items() if p in f.errors.ratios}
                for p in fp16.errors.ratios
            },
            rows_of_another_verdict=[name for name, verdict in others if verdict != word],
            undetermined=sorted(self.rounding.undetermined),
            zero_gradients=sorted(self.rounding.zero),
            reference=self.rounding.reference,
            float32=self.float32,
            float32_gradients=self.rounding.of_float32,
        )

    def _loss_scale(self) -> LossScaleResult:
        advice, used = self.advice, self.of_run.scales
        needed_db, (largest, where) = self.settings.needed_db, max(self.largest)
        needed, reason = (None, NO_ADVICE) if advice is None else need(advice, needed_db)
        return LossScaleResult(
            kind=self.scale_kind,
            in_use=self._in_use,
            lowest_in_use=min(used, default=None),
            highest_in_use=max(used, default=None),
            recommended=advice.scale if advice else None,
            reason=str(advice) if advice else NO_ADVICE,
            needed=needed,
            need=reason,
            largest_gradient=largest,
            where=where,
            headroom=self.settings.headroom,
            verdicts=[] if advice is None else self._judged_scales(advice),
        )

    def _judged_scales(self, advice: ScaleAdvice) -> list[ScaleVerdict]:
        scales = {
            "none": 1.0,
            "published": PUBLISHED,
            "in use": self._in_use,
            "recommended": advice.scale,
        }
        return [
            judge(scale, advice, self.settings.needed_db, label)
            for label, scale in scales.items()
            if scale is not None
        ]


NO_ADVICE = "no loss scale can be recommended: every gradient is zero, or one is not finite"


def _held(row: LayerStatistics, exact: Histogram) -> HeldValues:
    """The numbers of the run, beside the exact ones."""
    return HeldValues(
        dtypes=sorted(dtype_name(d) for d in row.dtypes),
        # max: the run may have fewer zeros, of a ReLU that rounding turned on
        became_zero=_share(max(0, row.histogram.zero - exact.zero), exact.nonzero),
        infinite=row.histogram.infinite,
        nan=row.histogram.nan,
    )


def _shares(row: LayerStatistics, to: Format) -> RangeShares:
    return _range_shares(row.histogram, to, row.noise.above.get(to.name, 0))


def _range_shares(counts: Histogram, to: Format, above: int, by: int = 0) -> RangeShares:
    """Shares of the non-zero values, times 2^by, with fewer bits or none in a format."""
    numbers = (
        counts.below(to.smallest_normal - by),
        counts.below(to.smallest - by),
        counts.up_to(to.smallest - 1 - by),  # half of the smallest number rounds to even: to 0
        above,
    )
    return RangeShares(*(_share(n, counts.nonzero) for n in numbers))


def _share(count: int, of: int) -> float | None:
    return count / of if of else None
