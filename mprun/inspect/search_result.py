"""What `mprun search-ops` measured and decided: its settings, `search_ops.json`, tables and files.

A mode of 16 bits chooses ops, or modules, that stay in float32; a mode with formats of 8 bits or
fewer chooses matrix products of linear layers (GEMMs) that stay in bfloat16. Both leave an
`OpSearch`. The files are op lists as YAML, both lists in one, as `op_lists.lower_file` and
`op_lists.fp32_file` read them; and layers, which `precision.layers_file` reads. `Deviation`, the
distance from float32, is part of `numerics.json` too; its floats may be infinite or NaN. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Annotated, NamedTuple

from msgspec import Meta

from mprun.records.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.console.formatting import joined, listed
from mprun.records.layer_values import layers_file
from mprun.records.mode_names import SHORT_DTYPES
from mprun.records.policy_columns import Count, Legal, Number, Positive
from mprun.records.run_record import Reference

FILE = "search_ops.json"
OPS, LAYERS = "ops.yaml", "layers.yaml"
MAX_ROWS = 20  # Of a printed table
MAX_NAMES = 8  # Up to this many ops or GEMMs are named in a sentence


@dataclass
class SearchOpsSettings:
    """How ops that must stay in float32 are searched, and the tolerance for the others."""

    tolerance: Positive = 0.01
    """Relative difference of the loss from float32's that is tolerated."""
    gradient_db: Annotated[float, Meta(ge=-1000, le=1000)] | None = 20.0
    """Least SQNR of each gradient against float32, in dB; null: only the loss counts."""
    effective_bits: Annotated[float, Meta(gt=0, le=16)] | None = None
    """With a format of 8 bits or fewer: the smallest error at so many effective bits; null: the
    fewest bits."""
    per: Annotated[str, Legal("gemm", "layer")] = "gemm"
    """With such a format: gemm judges each GEMM of a linear layer by itself, layer all together."""
    batches: Count = 4
    """Batches of validation data used for the measurements."""
    warmup_steps: Number = 20
    """Steps trained in float32 before; 0 measures the initial weights."""
    always: list[str] = field(default_factory=list)
    """Ops that always stay in float32: [softmax, log]."""
    modules: bool = True
    """Whether modules are measured, and suggested if they are the better answer."""
    budget_min: Positive | None = None
    """Minutes for the search; measurements that would exceed them are left out. null: no limit."""


# ---- the record ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deviation:
    """The distance from float32 of a loss and of gradients."""

    loss_difference: float  # Relative difference of the loss; infinite or NaN if a loss is
    gradients_db: float
    """SQNR of all judged gradients as one vector, in dB; NaN if a gradient is not finite."""
    worst_db: float  # The lowest SQNR of a parameter's gradient, in dB; NaN as above
    worst_parameter: str  # The parameter with that SQNR; empty if a loss is not finite
    loss_scale: float  # The smallest loss scale that was used on any batch
    failure: str = ""  # Why nothing could be measured: an op has no kernel for its dtypes
    loss_beyond: float | None = None
    """The loss difference minus the difference between batches; None if that is unknown."""
    beyond_db: float | None = None
    """The lowest SQNR of a parameter if only the error counts that is larger than the difference
    between batches (`inspect/rounding_oracle.py`); None if that difference is unknown."""
    beyond_parameter: str = ""  # The parameter with that SQNR

    @property
    def judged_loss(self) -> float:
        """The loss difference that is compared with the tolerance."""
        return self.loss_difference if self.loss_beyond is None else self.loss_beyond

    @property
    def judged_db(self) -> float:
        """The SQNR that is compared with the tolerance."""
        return self.worst_db if self.beyond_db is None else self.beyond_db


@dataclass(frozen=True)
class SearchTolerance:
    """The distance from float32 that was allowed."""

    loss: float  # Relative difference of the loss
    gradient_db: float | None
    """Lowest SQNR of a parameter's gradient, in dB; None if only the loss was judged."""


@dataclass(frozen=True)
class Samples:
    """The data of the measurements."""

    split: str  # validation, or train for a recipe without validation data
    batches: int
    batch_size: int


@dataclass(frozen=True)
class CastResult:
    """A cast of the model's ops, measured."""

    measure: Deviation
    cost: float | None = None  # Its effective bits, in a search for GEMMs
    name: str = ""  # Of the configuration's casts: autocast, the mode, or the name of the op lists


@dataclass(frozen=True)
class SensitivityRow:
    """The effect of one op, module or GEMM: only this is lower, everything else is float32."""

    name: str
    calls: int  # In a forward pass; of a layer the number of its GEMMs
    harm_alone: float  # The error of `alone` over the tolerance; above 1 is too much
    alone: Deviation


@dataclass(frozen=True)
class Selection:
    """The smallest list to keep in the higher precision."""

    high: tuple[str, ...]  # The names; the largest error alone first
    harm: float  # The error with them high, over the tolerance; at most 1 is tolerated
    measure: Deviation
    cost: float
    """Of ops and modules: the share of the numbers computed in the forward pass that are float32.
    Of GEMMs: effective bits."""

    @property
    def is_within(self) -> bool:
        """Whether the error is tolerated; if not, no list does that, or none within the budget."""
        return self.harm <= 1


@dataclass(frozen=True, kw_only=True)
class OpSearch:
    """Everything that a search measured and decided; its kinds are ops and modules, GEMMs, or
    layers."""

    low: str  # The lower precision: float16, bfloat16, or the mode with the format
    high: str  # The higher one: float32, or bfloat16 beside a format
    measured_on: Samples
    tolerance: SearchTolerance
    unjudged_parameters: list[str]  # Parameters whose float32 gradients are only rounding errors
    zero_gradients: list[str]  # Parameters whose float32 gradients are exactly zero
    reference: Reference
    unavoidable: Deviation  # Everything in float32, with weights of the lower precision
    everything_lower: CastResult
    given: CastResult  # The casts that the search started from; beside a format those of bf16_mixed
    rows: dict[str, list[SensitivityRow]]  # By kind
    search: dict[str, Selection]  # By kind; without those that were not reached
    answer: str  # The kind of the selection to use; none without one
    budget: float | None = None  # The most effective bits that were asked for
    always: list[str] = field(default_factory=list)  # Ops that the user keeps in float32
    lower: list[str] = field(default_factory=list)  # Ops on the lower list when every op is lower
    layers: dict[str, str] = field(default_factory=dict)
    """Modules, or layers, of the answer as `precision.layers` takes them."""
    ended_by: str | None = None  # What ended the search early: a signal, or search_ops.budget_min
    unsettled: list[str] = field(default_factory=list)  # What is left open, a sentence each

    @property
    def selection(self) -> Selection | None:
        """The answer."""
        return self.search.get(self.answer)

    @property
    def keeps_low(self) -> bool:
        """Whether the answer leaves anything in the lower precision."""
        answer = self.selection
        return answer is not None and len(answer.high) < len(self.rows[self.answer])

    def cost_text(self, cost: float | None) -> str:
        """A cost as tables have it."""
        if cost is None:
            return ""
        return f"{cost:.0%}" if self.high == "float32" else f"{cost:.2f}"


# ---- the sentence and the tables -----------------------------------------------------------------


def search_parts(search: OpSearch) -> Iterator[FittedTable | str]:
    """The answer, the candidates one at a time, the outcome."""
    yield answer_sentence(search)
    yield from (rows_table(search, kind) for kind, rows in search.rows.items() if rows)
    yield outcome_table(search)


def answer_sentence(search: OpSearch) -> str:
    """What has to stay in the higher precision, by the measurements."""
    answer, kind = search.selection, search.answer
    if answer is None:
        return "No answer yet: the search ended before it had one."
    one, bits = kind.removesuffix("s"), _bits_clause(search, answer)
    if search.budget is not None:
        much = "" if answer.is_within else f" ({answer.harm:.1f} times as much)"
        return (
            f"At most {search.budget:g} effective bits: {_named(answer.high) or 'nothing'} in "
            f"{search.high} has the smallest error of the sets measured, "
            f"{'' if answer.is_within else 'not '}within the tolerance{much}{bits}."
        )
    if not answer.is_within:
        return (
            f"No list of {kind} is enough: with every {one} in {search.high} the difference is "
            "still too large."
        )
    if not answer.high:
        other = " beside those of search_ops.always" if search.always else ""
        return f"No {one}{other} has to stay in {search.high}{bits}."
    if search.high != "float32" and not search.keeps_low:
        return f"Every {one} has to stay in {search.high}: take precision=bf16_mixed."
    plural, have = ("", "has") if len(answer.high) == 1 else ("s", "have")
    text = f"The {one}{plural} {_named(answer.high)} {have} to stay in {search.high}{bits}"
    if kind != "modules":
        return f"{text}."
    return f"{text}; that leaves less there than the best list of ops ({_named(_ops(search))})."


def _ops(search: OpSearch) -> Sequence[str]:
    return search.search["ops"].high


def _named(names: Sequence[str]) -> str:
    if not names or len(names) > MAX_NAMES:
        return listed(names, MAX_NAMES)
    return joined(names)


def _bits_clause(search: OpSearch, answer: Selection) -> str:
    everything, given = search.everything_lower.cost, search.given.cost
    if everything is None:
        return ""
    lowest = f", {everything:.2f} with all in {search.low}" if answer.high else ""
    return (
        f"; {answer.cost:.2f} effective bits over all linear layers (bfloat16 has {given:g}{lowest}"
        ")"
    )


def rows_table(search: OpSearch, kind: str) -> FittedTable:
    """What each candidate of a kind does alone in the lower precision; worst first."""
    rows, low = search.rows[kind], SHORT_DTYPES.get(search.low, search.low)
    ordered = sorted(rows, key=lambda row: -row.harm_alone)
    more = len(rows) - MAX_ROWS
    return FittedTable(
        f"{kind}, one at a time",
        text_column(kind.removesuffix("s"), cell=lambda row: row.name),
        figure_column("calls", 0, lambda row: str(row.calls)),
        figure_column(f"only it {low}: loss", 2, lambda row: loss(row.alone)),
        figure_column(
            f"only it {low}: worst gradient", 3, lambda row: decibels(row.alone.worst_db)
        ),
        text_column("", cell=lambda row: "" if row.harm_alone <= 1 else "too large"),
        rows=ordered[:MAX_ROWS],
        elsewhere=FILE,
        caption=f"and {more} more, none with a larger error, in {FILE}" if more > 0 else "",
    )


class SearchOutcome(NamedTuple):
    """A row of an outcome: what is in the higher precision, and what that gives."""

    high: str
    measure: Deviation
    cost: float | None = None


def outcome_table(search: OpSearch) -> FittedTable:
    """Everything in the lower precision, the configured casts and the results, side by side."""
    # rounded weights are measured in float32, which a format's higher precision is not
    rounded = "all" if search.high == "float32" else "float32"
    rows = [
        SearchOutcome(f"{rounded}, weights rounded", search.unavoidable),
        SearchOutcome("nothing", search.everything_lower.measure, search.everything_lower.cost),
        SearchOutcome(f"as in {search.given.name}", search.given.measure, search.given.cost),
    ]
    for kind, one in search.search.items():
        # modules that are not enough are no alternative to the list of ops
        if kind == search.answer or one.is_within:
            names = _named((*search.always, *one.high)) or "nothing"
            mark = " <-" if search.answer == kind else ""
            rows.append(SearchOutcome(f"{kind}: {names}{mark}", one.measure, one.cost))
    cost = "fp32 numbers" if search.high == "float32" else "effective bits"

    def measured(text: Callable[[Deviation], str]) -> Callable[[SearchOutcome], str]:
        return lambda row: text(row.measure)

    return FittedTable(
        "outcome",
        text_column(f"in {search.high}", cell=lambda row: row.high),
        figure_column("loss", cell=measured(loss)),
        figure_column("gradients", 2, measured(lambda x: decibels(x.gradients_db))),
        figure_column("worst", 3, measured(lambda x: decibels(x.worst_db))),
        text_column("of", 1, cell=measured(lambda x: x.worst_parameter)),
        figure_column(cost, 4, lambda row: search.cost_text(row.cost)),
        rows=rows,
        elsewhere=FILE,
    )


def deviation_text(measure: Deviation) -> str:
    """A measurement in a line."""
    if measure.failure:
        return f"fails ({measure.failure})"
    if not measure.loss_difference < inf:
        return "the loss is not finite"
    gradients, worst = decibels(measure.gradients_db), decibels(measure.worst_db)
    name = measure.worst_parameter or "none"
    return f"loss {loss(measure)} off, gradients {gradients}, worst {worst} ({name})"


def loss(measure: Deviation) -> str:
    """The relative difference of the loss in per cent."""
    if measure.failure:
        return "fails"
    value = 100 * measure.loss_difference
    return f"{value:.2g} %" if value < inf else "not finite"


def decibels(db: float) -> str:
    """An SQNR."""
    if db == inf:
        return "exact"
    return "not finite" if isnan(db) else f"{db:.0f} dB"


# ---- the files -----------------------------------------------------------------------------------


def answer_files(search: OpSearch, config: str) -> dict[str, str]:
    """Name to content of the files that a run takes; nothing without an answer.

    Args:
        search: the search.
        config: for the comment at the top: `recipe mnist, precision fp16_mixed`.
    """
    answer = search.selection
    if answer is None:
        return {}
    head = "\n".join(_head(search, config, answer))
    layers = {LAYERS: layers_file(head, search.layers)} if search.layers else {}
    if search.high != "float32":
        return layers
    # modules are kept apart by layers, beside lists with every op lower
    fp32 = () if search.layers else answer.high
    lines = [*(f"# {line}" for line in head.splitlines()), *_lists(search, fp32)]
    return {OPS: "\n".join(lines) + "\n", **layers}


def _head(search: OpSearch, config: str, answer: Selection) -> Iterator[str]:
    on, tolerance, low = search.measured_on, search.tolerance, search.low
    yield f"Written by mprun search-ops: {config}."
    samples = f"{on.batches} batches of {on.batch_size} samples ({on.split})"
    yield f"Measured against float32 on {samples}."
    db = tolerance.gradient_db
    gradients = "" if db is None else f", every gradient's SQNR at least {db:.3g} dB"
    yield f"Tolerance: a loss {tolerance.loss:.2%} off{gradients}."
    yield f"Weights of {low}'s precision alone: {deviation_text(search.unavoidable)}."
    yield f"Everything in {low}: {deviation_text(search.everything_lower.measure)}."
    yield f"As listed here: {deviation_text(answer.measure)}."
    if not answer.is_within:
        yield "THIS EXCEEDS THE TOLERANCE: no list meets it."
    if search.high == "float32" and search.layers:
        yield f"Needs both files: {OPS} as op_lists.*_file, {LAYERS} as precision.layers_file."


def _lists(search: OpSearch, fp32: Sequence[str]) -> Iterator[str]:
    rows = {row.name: row for row in search.rows["ops"]}
    always = search.always
    yield "fp32:" + ("" if fp32 or always else " []  # no op needs it")
    yield from (f"  - {name}  # {_reason(search, rows[name])}" for name in fp32)
    yield from (f"  - {name}  # search_ops.always" for name in always)
    lower = [name for name in search.lower if name not in (*fp32, *always)]
    yield "lower:"
    yield from (f"  - {name}  # {_reason(search, rows[name])}" for name in lower if name in rows)
    yield "  # not in this model"
    yield from (f"  - {name}" for name in lower if name not in rows)


def _reason(search: OpSearch, row: SensitivityRow) -> str:
    size = "" if row.harm_alone <= 1 else "too large an error "
    return f"{size}alone in {SHORT_DTYPES[search.low]}: {deviation_text(row.alone)}"
