"""What `mprun search-ops` measured and decided: its settings, `search_ops.json`, tables and files.

A mode of 16 bits chooses ops that stay in float32; a mode with formats of 8 bits or fewer chooses
matrix products of linear layers (GEMMs) that stay in bfloat16. The file of the answer is an op list
as YAML, both lists in one, as `op_lists.lower_file` and `op_lists.fp32_file` read them; or layers,
which `precision.layers_file` reads. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf, isnan, nan
from operator import itemgetter
from typing import Annotated, Any

import yaml  # type: ignore[import-untyped]
from msgspec import Meta

from mprun.inspect.tolerance import Deviation, Tolerance
from mprun.records.console.fitted_table import FittedTable, TableColumn, figure_column, text_column
from mprun.records.console.formatting import listed
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
    per: Annotated[str, Legal("gemm", "layer")] = "gemm"
    """With a format of 8 bits or fewer: gemm judges each GEMM of a linear layer by itself, layer
    all together."""
    batches: Count = 4
    """Batches of validation data used for the measurements."""
    warmup_steps: Number = 20
    """Steps trained in float32 before; 0 measures the initial weights."""


# ---- the record ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """The data of the measurements."""

    split: str  # validation, or train for a recipe without validation data
    batches: int
    batch_size: int


@dataclass(frozen=True)
class Effect:
    """The effect of one op, GEMM or layer: only this is lower, everything else is float32."""

    name: str
    calls: int  # In a forward pass; of a layer the number of its GEMMs
    alone: Deviation


@dataclass(frozen=True)
class SensitivityRow(Effect):
    """An effect that is judged."""

    harm_alone: float  # The error of `alone` over the tolerance; above 1 is too much


@dataclass(frozen=True)
class Selection:
    """The smallest set to keep in the higher precision."""

    high: tuple[str, ...]  # The names; the largest error alone first
    harm: float  # The error with them high, over the tolerance; at most 1 is tolerated
    measure: Deviation

    @property
    def is_within(self) -> bool:
        """Whether the error is tolerated; if not, no set is enough."""
        return self.harm <= 1


@dataclass(frozen=True, kw_only=True)
class OpSearch:
    """Everything that a search measured and decided."""

    kind: str  # What is chosen: op, GEMM or layer
    low: str  # The lower precision: float16, bfloat16, or the mode with the format
    high: str  # The higher one: float32, or bfloat16 beside a format
    measured_on: Samples
    tolerance: Tolerance
    unjudged_parameters: list[str]  # Parameters whose float32 gradients are only rounding errors
    zero_gradients: list[str]  # Parameters whose float32 gradients are exactly zero
    reference: Reference
    unavoidable: Deviation  # Everything in float32, with weights of the lower precision
    everything_lower: Deviation
    given: Deviation  # The casts of the configuration; beside a format those of bf16_mixed
    given_name: str  # Of these casts: autocast, the mode, or the name of the op lists
    rows: list[SensitivityRow]
    answer: Selection
    lower: list[str] = field(default_factory=list)  # Ops on the lower list when every op is lower
    layers: dict[str, str] = field(default_factory=dict)
    """Layers of the answer as `precision.layers` takes them."""


# ---- the sentence and the tables -----------------------------------------------------------------


def answer_sentence(search: OpSearch) -> str:
    """What has to stay in the higher precision, by the measurements."""
    answer, kind, high = search.answer, search.kind, search.high
    if not answer.is_within:
        return (
            f"No list of {kind}s is enough: with every {kind} in {high} the difference is still "
            "too large."
        )
    if not answer.high:
        return f"No {kind} has to stay in {high}."
    if kind != "op" and not search.layers:
        return f"Every {kind} has to stay in {high}: take precision=bf16_mixed."
    plural, have = ("", "has") if len(answer.high) == 1 else ("s", "have")
    return f"The {kind}{plural} {listed(answer.high, MAX_NAMES)} {have} to stay in {high}."


def rows_table(search: OpSearch) -> FittedTable:
    """What each candidate does alone in the lower precision; worst first."""
    rows, low = search.rows, SHORT_DTYPES.get(search.low, search.low)
    more = len(rows) - MAX_ROWS
    return FittedTable(
        f"{search.kind}s, one at a time",
        text_column(search.kind, cell=lambda row: row.name),
        figure_column("calls", 0, lambda row: str(row.calls)),
        figure_column(f"only it {low}: loss", 2, lambda row: loss(row.alone)),
        figure_column(
            f"only it {low}: worst gradient", 3, lambda row: decibels(row.alone.worst_db)
        ),
        *_quantity_columns(search, lambda row: row.alone),
        text_column("", cell=lambda row: "" if row.harm_alone <= 1 else "too large"),
        rows=sorted(rows, key=lambda row: -row.harm_alone)[:MAX_ROWS],
        elsewhere=FILE,
        caption=f"and {more} more, none with a larger error, in {FILE}" if more > 0 else "",
    )


def outcome_table(search: OpSearch) -> FittedTable:
    """Everything in the lower precision, the configured casts and the answer, side by side."""
    # rounded weights are measured in float32, which a format's higher precision is not
    rounded = "all" if search.high == "float32" else "float32"
    names = listed(search.answer.high, MAX_NAMES) or "nothing"
    rows: list[tuple[str, Deviation]] = [
        (f"{rounded}, weights rounded", search.unavoidable),
        ("nothing", search.everything_lower),
        (f"as in {search.given_name}", search.given),
        (f"{search.kind}s: {names} <-", search.answer.measure),
    ]
    return FittedTable(
        "outcome",
        text_column(f"in {search.high}", cell=itemgetter(0)),
        figure_column("loss", cell=lambda row: loss(row[1])),
        figure_column("gradients", 2, lambda row: decibels(row[1].gradients_db)),
        figure_column("worst", 3, lambda row: decibels(row[1].worst_db)),
        text_column("of", 1, cell=lambda row: row[1].worst_parameter),
        *_quantity_columns(search, itemgetter(1)),
        rows=rows,
        elsewhere=FILE,
    )


def _quantity_columns(search: OpSearch, of: Callable[[Any], Deviation]) -> list[TableColumn]:
    """A column for each quantity of the recipe."""

    def cell(name: str, row: Any) -> str:
        return decibels(of(row).quantities_db.get(name, nan))

    names = search.everything_lower.quantities_db
    return [figure_column(name, 4, cell=partial(cell, name)) for name in names]


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
    """Name to content of the file that a run takes; nothing where no layer keeps its format.

    `config` is for the comment at the top: `recipe mnist, precision fp16_mixed`.
    """
    answer = search.answer
    head = f"Written by mprun search-ops: {config}"
    if not answer.is_within:
        head += "\nTHIS EXCEEDS THE TOLERANCE: no list meets it."
    if search.kind != "op":
        return {LAYERS: layers_file(head, search.layers)} if search.layers else {}
    fp32 = list(answer.high)
    lists = {"fp32": fp32, "lower": [name for name in search.lower if name not in fp32]}
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return {OPS: comment + yaml.safe_dump(lists, sort_keys=False)}
