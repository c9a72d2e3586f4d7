"""`mprun numerics`: what 16-bit formats do to a run's numbers, and which loss scale to take.

    mprun numerics recipe=mnist precision=fp16_mixed
    mprun numerics recipe=mnist precision=fp16_mixed --verbose    (the tables, too)

Takes the overrides of a run, and `numerics.*` settings. Trains, collects statistics at some steps
and prints the answer. Writes `numerics.json` with everything, and plots, into the run's folder.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Annotated

import msgspec
from msgspec import Meta

from mprun.inspect.question import Question, SavedResult, prepared_by
from mprun.inspect.search_result import decibels
from mprun.inspect.tolerance import Deviation, Tolerance
from mprun.records.console.fitted_table import FittedTable, broken, figure_column, text_column
from mprun.records.console.formatting import listed, share_text, shortened
from mprun.records.mode_names import FURTHER_FORMATS
from mprun.records.policy_columns import Count, Legal, NotNegative, Number
from mprun.records.run_record import Float32Gradients, LostShares, Reference


@dataclass
class NumericsSettings:
    """Which steps are inspected, and what their numbers must keep."""

    steps: Count | None = None
    """Number of steps that are inspected, evenly spread over the span; null: 20, or fewer, but at
    least 5, where those take longer than 35 s."""
    warmup: Number = 3
    """Steps before the first one that may be inspected."""
    span: Count = 200
    """The last step that may be inspected; at most the run's last step."""
    headroom: Annotated[float, Meta(ge=1, le=2**20)] = 2.0
    """How many times larger gradients may become before one overflows at the recommended scale."""
    needed_db: NotNegative = 20.0
    """Signal-to-noise ratio, in dB, that numbers must keep in a format that is good enough."""
    formats: list[Annotated[str, Legal(*FURTHER_FORMATS)]] = field(default_factory=list)
    """Formats of 4 to 8 bits whose rounding noise is measured beside the usual ones."""
    top: Count = 20
    """Rows of the table, the worst first; all are in numerics.json."""
    plots: bool = True
    """Whether the plots are drawn."""


@dataclass(frozen=True)
class FormatResult:
    """The passes in one 16-bit format."""

    within_tolerance: bool  # Whether loss and gradients are within the tolerance
    measure: Deviation
    unavoidable: Deviation  # The same with nothing but weights of the format's precision
    tolerance: Tolerance


@dataclass(frozen=True)
class Float32Loss:
    """A loss in float32 that is not float64's, of the same ops."""

    loss: float
    float64: float
    op: str  # The op that loses it; empty if it is not known
    module: str  # Its module; empty for the model itself and outside of it


@dataclass(frozen=True)
class ModelVerdict:
    """Range or precision: which 16-bit format the model needs."""

    word: str
    reason: str
    deciding_rows: list[str]  # The losses and rows that decided
    gradients_db: dict[str, float]  # fp16 and bf16 to the SQNR of all judged gradients, in dB
    passes: dict[str, FormatResult]
    parameters_db: dict[str, dict[str, float]]
    """Parameter to format to the SQNR of its gradient, in dB."""
    rows_of_another_verdict: list[str]
    undetermined: list[str]  # Parameters whose float32 gradients are only rounding errors
    zero_gradients: list[str]
    reference: Reference
    float32: Float32Loss | None = None
    """Of a step in which float32 itself was not good enough; None without one."""
    float32_gradients: Float32Gradients | None = None
    """Where float32's gradients are not good enough, over all steps; None where they are."""


@dataclass(frozen=True)
class ScaleVerdict:
    """Whether a loss scale fits float16."""

    label: str  # none, published, in use or recommended; empty for another
    scale: float
    word: str  # too low, too high or fine
    reason: str
    becoming_zero: float | None  # Share of non-zero gradients that become 0 at it
    losing_bits: float | None  # Share of non-zero gradients that become subnormal or 0


@dataclass(frozen=True)
class LossScaleResult:
    """The run's loss scale, and the recommended one."""

    kind: str  # none, static or dynamic
    in_use: float | None  # At the last inspected step; None without a loss scale
    lowest_in_use: float | None
    highest_in_use: float | None
    recommended: float | None  # None if every gradient is zero, or one is not finite
    reason: str
    needed: bool | None
    need: str  # Why one is needed or not
    largest_gradient: float
    where: str
    headroom: float
    verdicts: list[ScaleVerdict]


@dataclass(frozen=True)
class LostUpdatesResult:
    """Lost updates of all weights and of each parameter."""

    all: LostShares
    by_parameter: dict[str, LostShares]


@dataclass(frozen=True)
class Histogram:
    """Counts of values by exponent, in ascending order."""

    exponents: dict[int, int] = field(default_factory=dict)
    """e to the number of values with 2^e <= |x| < 2^(e+1)."""
    powers: dict[int, int] = field(default_factory=dict)
    """e to the number of those with |x| = 2^e."""
    zero: int = 0
    infinite: int = 0
    nan: int = 0
    largest: float = 0.0  # The largest finite magnitude; 0 without any

    @property
    def nonzero(self) -> int:
        """Finite values that are not zero."""
        return sum(self.exponents.values())

    @property
    def total(self) -> int:
        """All values."""
        return self.nonzero + self.zero + self.infinite + self.nan

    def below(self, exponent: int) -> int:
        """How many of the non-zero values have |x| < 2^exponent."""
        return sum(n for e, n in self.exponents.items() if e < exponent)

    def up_to(self, exponent: int) -> int:
        """How many of the non-zero values have |x| <= 2^exponent."""
        return self.below(exponent) + self.powers.get(exponent, 0)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(
            _sorted(Counter(self.exponents) + Counter(other.exponents)),
            _sorted(Counter(self.powers) + Counter(other.powers)),
            self.zero + other.zero,
            self.infinite + other.infinite,
            self.nan + other.nan,
            max(self.largest, other.largest),
        )


def _sorted(counts: dict[int, int]) -> dict[int, int]:
    return dict(sorted(counts.items()))


@dataclass(frozen=True)
class RangeShares:
    """The shares of non-zero values that a format holds with fewer bits, or not at all.

    None if there are no such values.
    """

    below_normal: float | None
    below_smallest: float | None
    becoming_zero: float | None
    above_largest: float | None


@dataclass(frozen=True)
class HeldValues:
    """The numbers in the run itself, before any simulated format."""

    dtypes: list[str]
    became_zero: float | None
    infinite: int
    nan: int


class LossScaledRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Gradients in float16 times a loss scale; the file leaves out `fp16` where it is None."""

    recommended: float
    fp16_db: float  # The SQNR at the recommended scale, in dB
    in_use: float | None
    fp16: RangeShares | None = None  # At the scale in use; None without one


@dataclass(frozen=True)
class NumericsRow:
    """One tensor of the model: a weight, an activation, a gradient or an update."""

    kind: str
    name: str
    histogram: Histogram
    fp16: RangeShares
    bf16: RangeShares
    sqnr_db: dict[str, float]
    """Format to the SQNR of rounding to it, in dB; names with per-tensor scaling end in
    `_scaled`."""
    verdict: str | None
    """Range or precision; None for updates and for rows that are only rounding errors."""
    held: HeldValues | None
    loss_scaled: LossScaledRow | None


SEEDS = 3  # Of a spread over trainings: the run's, and two more


@dataclass(frozen=True)
class QuantityError:
    """A quantity of a model, in dB."""

    name: str
    db: dict[str, float]  # Precision to its SQNR against float64
    training_db: float  # The SQNR that the spread over seeds leaves
    steps: int  # Of each training
    seeds: int = SEEDS


@dataclass(frozen=True)
class NumericsResult:
    """Everything that was measured."""

    verdict: ModelVerdict
    loss_scale: LossScaleResult
    lost_updates: LostUpdatesResult
    rows: list[NumericsRow] = field(default_factory=list)
    quantities: list[QuantityError] = field(default_factory=list)
    """Of the recipe's quantities, by the weights after the last inspected step."""


# Version 1 had other names: `really`, `will_do`; it is not shown again. 2 had loss scales that were
# tried
SCHEMA_VERSION = 3
QUESTION = Question(
    "numerics",
    prepared_by("mprun.inspect.numerics_of_steps"),
    (NumericsSettings,),
    saved=SavedResult(
        "numerics.json",
        NumericsResult,
        SCHEMA_VERSION,
        lambda record: numerics_parts(record, NumericsSettings().top, verbose=True),
        lambda record: numerics_parts(record, 0, verbose=False),
    ),
)

# A kind of numbers to its short name in tables, and its title in pictures
KINDS = {
    "weights": ("weights", "weights"),
    "activations": ("activ.", "activations"),
    "activation_gradients": ("act. grad", "gradients of activations, unscaled"),
    "weight_gradients": ("wt. grad", "gradients of weights, unscaled"),
    "updates": ("updates", "updates"),
}
LONG = {"fp16": "float16", "bf16": "bfloat16"}
RULES = {"nearest": "nearest", "stochastic": "stoch.", "kahan": "kahan"}
ELSEWHERE = "numerics.json"  # A table that is cut names the file with the rest
NAMED = 5  # The most parameters or rows named in a sentence
LONGEST = 99  # Columns of a line of the answer
SHORTEST = 16  # Characters that the name of a layer keeps in it


def numerics_parts(result: NumericsResult, top: int, verbose: bool) -> Iterator[FittedTable | str]:
    """What the terminal shows: the answer; if `verbose`, the tables with up to `top` rows, too."""
    yield from sentences(result)
    if not verbose:
        return
    yield scales_table(result)
    yield rows_table(result, top)
    yield lost_table(result, top // 2)  # half: the first table is the one that decides


def rows_table(result: NumericsResult, top: int) -> FittedTable:
    """The `top` rows that decide most: first what decides, then the noise of the format alone.

    A verdict comes from losses and gradients of whole passes in a format. Rounding the numbers of
    a row alone changes them less as a rule.
    """
    judged = [row for row in result.rows if row.verdict is not None]

    def decides(row: NumericsRow) -> tuple[bool, float, float]:
        in_passes = _passes_db(result, row).values()
        return row.verdict == "either", min(in_passes, default=math.inf), fp16_db(row)

    rows = sorted(judged, key=decides)
    scale = result.loss_scale.in_use
    values = "unscaled" if scale is None else f"gradients times the loss scale {number(scale)}"

    def of_pass(name: str) -> Callable[[NumericsRow], str]:
        return lambda row: f"{_passes_db(result, row).get(name, math.nan):.0f}".replace("nan", "-")

    return FittedTable(
        f"what decides: {min(top, len(rows))} of {len(rows)} rows, the worst first (pass: "
        "gradients of whole passes in the format; then its rounding of the numbers alone; "
        f"shares: float16, {values})",
        text_column("kind", cell=lambda row: KINDS[row.kind][0]),
        text_column("of", cell=lambda row: row.name),
        figure_column("fp16 pass dB", 10, of_pass("fp16")),
        figure_column("bf16 pass dB", 10, of_pass("bf16")),
        text_column("verdict", cell=lambda row: row.verdict or ""),
        figure_column("fp16 dB", 8, lambda row: f"{fp16_db(row):.0f}"),
        *(
            figure_column(f"{heading} dB", importance, partial(_rounded_db, name))
            for heading, importance, name in (
                ("bf16", 7, "bf16"),
                ("e4m3", 3, "e4m3_scaled"),  # float8 is used with a scale per tensor
                *((x, 2, x) for x in FURTHER_FORMATS if any(x in row.sqnr_db for row in rows)),
            )
        ),
        figure_column("zero", 1, lambda row: share_text(row.histogram.zero / row.histogram.total)),
        figure_column("lose bits", 5, lambda row: share_text(_in_run(row).below_normal)),
        figure_column("to 0", 6, lambda row: share_text(_in_run(row).becoming_zero)),
        figure_column("inf", 4, lambda row: share_text(_in_run(row).above_largest)),
        rows=rows[:top],
        elsewhere=ELSEWHERE,
    )


def _rounded_db(name: str, row: NumericsRow) -> str:
    return f"{row.sqnr_db.get(name, math.inf):.0f}"


def _in_run(row: NumericsRow) -> RangeShares:
    """The shares in float16; of gradients at the loss scale in use."""
    scaled = row.loss_scaled
    return row.fp16 if scaled is None or scaled.fp16 is None else scaled.fp16


def _passes_db(result: NumericsResult, row: NumericsRow) -> dict[str, float]:
    """Format to the SQNR of a parameter's gradient in whole passes; empty for other rows."""
    is_gradient = row.kind == "weight_gradients"
    return result.verdict.parameters_db.get(row.name, {}) if is_gradient else {}


def fp16_db(row: NumericsRow) -> float:
    """The SQNR in float16; of gradients at the recommended loss scale."""
    # inf: a row whose values are all zero loses nothing
    scaled = row.loss_scaled
    return row.sqnr_db.get("fp16", float("inf")) if scaled is None else scaled.fp16_db


def scales_table(result: NumericsResult) -> FittedTable:
    """The verdicts on some loss scales."""
    # where none is needed, none is recommended: the scale is the largest that fits
    named = {} if result.loss_scale.needed else {"recommended": "largest"}
    return FittedTable(
        "loss scales, in float16 (dB: signal over noise of the worst gradient)",
        text_column("", cell=lambda verdict: named.get(verdict.label, verdict.label)),
        figure_column("scale", cell=lambda verdict: number(verdict.scale)),
        text_column("verdict", cell=lambda verdict: verdict.word),
        figure_column("to 0", 2, lambda verdict: share_text(verdict.becoming_zero)),
        figure_column("lose bits", 1, lambda verdict: share_text(verdict.losing_bits)),
        text_column("why", cell=lambda verdict: verdict.reason),
        rows=result.loss_scale.verdicts,
        elsewhere=ELSEWHERE,
    )


def lost_table(result: NumericsResult, top: int) -> FittedTable:
    """Updates that weights in 16 bits would lose: of all weights, and of the worst ones."""
    lost, rows = result.lost_updates, result.lost_updates.by_parameter
    # rounding to nearest loses most
    most = {n: (x.fp16["nearest"] or 0) + (x.bf16["nearest"] or 0) for n, x in rows.items()}
    worst = sorted(rows.items(), key=lambda item: -most[item[0]])
    return FittedTable(
        "share of updates that would be lost with weights in 16 bits, by rounding",
        text_column("of", cell=itemgetter(0)),
        *(
            figure_column(f"{dtype} {short}", -place, partial(_lost_share, dtype, rule))
            for dtype in ("fp16", "bf16")
            for place, (rule, short) in enumerate(RULES.items())
        ),
        figure_column("this run", cell=lambda item: share_text(item[1].lost_in_run)),
        rows=[("all weights", lost.all), *worst[:top]],
        elsewhere=ELSEWHERE,
    )


def _lost_share(dtype: str, rule: str, item: tuple[str, LostShares]) -> str:
    shares: dict[str, float | None] = getattr(item[1], dtype)
    return share_text(shares[rule])


def error_lines(errors: Sequence[QuantityError]) -> Iterator[str]:
    """`quantity forces: 52 dB in bf16_mixed; training leaves 30 dB (3 seeds, 200 steps)`."""
    for x in errors:
        levels = ", ".join(f"{decibels(db)} in {mode}" for mode, db in x.db.items())
        spread = (
            f"{decibels(x.training_db)} (the spread over {x.seeds} seeds after {x.steps} steps)"
        )
        yield f"quantity {x.name} against float64: {levels}; training leaves {spread}"


# The verdict on a model as a sentence
GOOD_ENOUGH = {
    "either": "float16 and bfloat16 are both good enough",
    "needs range: bf16": "bfloat16 is good enough; float16 is not: it lacks range",
    "needs precision: fp16": "float16 is good enough; bfloat16 is not: it lacks precision",
    "needs fp32": "neither float16 nor bfloat16 is good enough: train in float32",
}


def answer_sentence(result: NumericsResult) -> str:
    """Which formats are good enough, and the loss scale of float16 if it is one of them."""
    word, scale = result.verdict.word, result.loss_scale
    if result.verdict.float32 is not None:
        return _float32_sentence(result.verdict.float32)
    if (of_gradients := result.verdict.float32_gradients) is not None:
        differ = "they are nothing but rounding errors"
        if of_gradients.db > 0:  # at 0 dB and below, the error is as large as the gradient
            share = 10 ** (-of_gradients.db / 20)  # of amplitude
            differ = f"they differ from float64's by {share:.0%}"
        answer = "float32 itself is not good enough for the gradients"
        return f"{answer}: {differ}, most in {of_gradients.worst}."
    answer = f"{GOOD_ENOUGH.get(word, word)}."
    if word not in ("either", "needs precision: fp16") or scale.needed is None:
        return answer
    return f"{answer} float16 needs {'a' if scale.needed else 'no'} loss scale."


def _float32_sentence(result: Float32Loss) -> str:
    """That float32 is not good enough, and where; or that no format is."""
    answer, does = "float32 itself is not good enough here", "loses it"
    if math.isfinite(result.float64):
        answer += f": the loss is {result.loss:.6g}, in float64 {result.float64:.6g}"
    else:
        answer = f"no format is good enough here: the loss is {result.float64} in float64 too"
        does = "makes it"
    where = f" in {result.module}" if result.module else ""
    return f"{answer}; {result.op}{where} {does}." if result.op else f"{answer}."


def sentences(result: NumericsResult) -> list[str]:
    """The answer in about ten lines: formats, what decides, the loss scale, lost updates."""
    verdict = result.verdict
    is_inexact = verdict.float32 or verdict.float32_gradients
    label = "compared with float32" if is_inexact else "what decides"
    criterion, *formats = pass_sentences(verdict.passes)
    decided = [f"  decided by: {listed(rows, 2)}"] if (rows := verdict.deciding_rows) else []
    lines = [
        *(answer_sentence(result), f"{label}: {criterion}", *formats, *decided),
        *unjudged(verdict.undetermined, verdict.zero_gradients, verdict.reference, most=2),
        *_scale(result.loss_scale),
        *_lost(result.lost_updates.all),
        *error_lines(result.quantities),
    ]
    return [part for line in lines for part in broken(_with_short_names(line), LONGEST)]


def _with_short_names(line: str) -> str:
    """A line that fits: its longest words, which are names of layers, are cut in the middle."""
    names = [word for word in line.split() if word.strip("(") not in KINDS]
    for name in sorted(names, key=len, reverse=True):
        fitting = max(SHORTEST, len(name) - max(0, len(line) - LONGEST))
        line = line.replace(name, shortened(name, fitting), 1)
    return line


def pass_sentences(passes: Mapping[str, FormatResult]) -> Iterator[str]:
    """How exact gradients and loss are in each format, and how exact they have to be."""
    needs = {k: f"; {x.tolerance.gradient_db or 0:.3g} dB are needed" for k, x in passes.items()}
    common = needs["fp16"] if len(set(needs.values())) == 1 else ""
    yield f"signal over noise of the worst parameter's gradient{common}"
    for name, x in passes.items():
        need = "" if common else needs[name]
        yield f"  {LONG[name]}: {_exactness(x.measure, x.tolerance)}{need}"


def _exactness(measure: Deviation, tolerance: Tolerance) -> str:
    """How exact the gradients are, and the loss where it is not exact enough."""
    if not math.isfinite(measure.loss_difference):
        return "the loss is not finite"
    text = f"{measure.worst_db:.1f} dB ({measure.worst_parameter})"
    if measure.worst_db == math.inf:
        text = "no error"
    if measure.worst_db == -math.inf:
        text = f"the gradient of {measure.worst_parameter} is not finite"
    elif measure.worst_db < min(tolerance.gradient_db or 0, measure.judged_db):
        judged = measure.judged_db
        text += ", within" if judged == math.inf else f", {judged:.1f} dB beyond"
        text += " the noise between batches"
    if measure.judged_loss > tolerance.loss:
        text += f"; loss off by {measure.judged_loss:.2%} ({tolerance.loss:.2%} tolerated)"
    return text


def _scale(scale: LossScaleResult) -> Iterator[str]:
    """What float16 loses without a loss scale, and which one is recommended, or would fit."""
    if scale.needed is None:
        yield scale.reason
        return
    zero = next((x.becoming_zero for x in scale.verdicts if x.label == "none"), None)
    lost = f"; {share_text(zero)} become 0" if zero else ""
    yield f"{scale.need.partition(': ')[2]}{lost}"  # the answer says whether one is needed
    label = "recommended" if scale.needed else "largest that fits"
    yield f"  {label}: {scale.reason.partition('; ')[0]}"


def _lost(lost: LostShares) -> Iterator[str]:
    """What rounding to nearest would do to weights in 16 bits; nothing where none was updated."""
    if (bf16 := lost.bf16["nearest"]) is None or (fp16 := lost.fp16["nearest"]) is None:
        return
    cure = "; cures: bf16_sr, half_sr" if max(bf16, fp16) else ""
    shares = f"{share_text(bf16)} in bfloat16, {share_text(fp16)} in float16"
    yield f"16-bit weights lose updates: {shares}{cure}"


def unjudged(
    undetermined: Sequence[str], zero: Sequence[str], reference: Reference, most: int = NAMED
) -> Iterator[str]:
    """Parameters not judged: their gradients are only rounding errors, or exactly zero."""
    if undetermined:
        yield f"not judged, gradients are only rounding errors: {listed(undetermined, most)}"
    if zero:
        yield f"not judged, gradients are exactly zero: {listed(zero, most)}"
    if reference.reason:
        yield f"note: rounding errors are those beside {reference.name}: {reference.reason}"


def number(scale: float) -> str:
    """A loss scale: 65,536 or 0.0625."""
    return f"{scale:,.0f}" if scale >= 1 and scale == int(scale) else f"{scale:.4g}"
