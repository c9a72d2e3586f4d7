"""A search for ops on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isnan

from rich.table import Table

from mprun.compare.formatting import counted
from mprun.console import figure_column, new_table, text_column
from mprun.records.deviation import Deviation
from mprun.records.search_ops_record import OpSearch, Proof, SensitivityRow
from mprun.report.tables import SHORT_DTYPES

MOST_ROWS = 20


def rows_table(search: OpSearch, what: str) -> Table:
    """The effect of each of `what`, ops or modules, the most harmful first."""
    rows: Sequence[SensitivityRow] = search.ops if what == "ops" else search.modules
    is_timed = any(row.time_ratio is not None for row in rows)
    headings = (
        f"only it {SHORT_DTYPES[search.dtype]}: loss",
        "worst gradient",
        "",
        "all but it: loss",
    )
    table = new_table(
        f"{what}, one at a time",
        text_column(what.removesuffix("s")),
        *(text_column(heading, justify="right") for heading in ("calls", *headings)),
        text_column("worst gradient", justify="right"),
        *([figure_column("time")] if is_timed else []),
    )
    rows = sorted(rows, key=lambda row: -row.harm_alone)
    for row in rows[:MOST_ROWS]:
        table.add_row(
            row.name,
            str(row.calls),
            *(loss(row.alone), decibels(row.alone.worst_db)),
            "" if row.harm_alone <= 1 else "harmful",
            *(loss(row.kept), decibels(row.kept.worst_db)),
            *([times(row.time_ratio)] if is_timed else []),
        )
    if (more := len(rows) - MOST_ROWS) > 0:
        table.caption = f"and {more} more, none more harmful, in search_ops.json"
    return table


def outcome_table(search: OpSearch) -> Table:
    """Everything in the lower dtype, the configured casts and the results, side by side."""
    is_timed = search.float32.time_ratio is not None
    table = new_table(
        "outcome",
        text_column("in float32"),
        *(text_column(heading, justify="right") for heading in ("loss", "gradients", "worst")),
        text_column("of"),
        text_column("fp32 numbers", justify="right"),
        *([figure_column("time")] if is_timed else []),
    )

    def add(name: str, measure: Deviation, time_ratio: float | None, share: str = "") -> None:
        table.add_row(
            name,
            *(loss(measure), decibels(measure.gradients_db)),
            *(decibels(measure.worst_db), measure.worst_parameter, share),
            *([times(time_ratio)] if is_timed else []),
        )

    add("all, weights rounded", search.unavoidable.measure, None)
    add("nothing", search.everything_lower.measure, search.everything_lower.time_ratio)
    add(f"as in {search.given.name}", search.given.measure, search.given.time_ratio)
    lists = search.search
    for what, row in () if lists is None else (("ops", lists.ops), ("modules", lists.modules)):
        if row is not None and (what == "ops" or row.is_within):
            names = ", ".join((*search.always, *row.fp32)) or "nothing"
            mark = " <-" if search.answer == what else ""
            add(f"{what}: {names}{mark}", row.measure, row.time_ratio, f"{row.float32_share:.0%}")
    if is_timed:
        table.add_row("everything", *[""] * 4, "100%", times(search.float32.time_ratio))
    return table


def proof_lines(proof: Proof) -> Iterator[str]:
    """The verdict of the paired trainings, and its figures."""
    unit = " %" if proof.is_relative else " points"
    mean = 100 * proof.difference
    difference = f"{mean:+.2f}{unit}" if abs(mean) < inf else "not finite"
    if proof.interval is not None:
        low, high = (100 * end for end in proof.interval)
        difference += f" (95 %: {low:+.2f} to {high:+.2f})"
    more = f", about {proof.more_seeds} more seeds" if proof.more_seeds else ""
    yield (
        f"proof: {counted(len(proof.values), 'pair')} of trainings of {proof.steps} steps, "
        f"{proof.split} {proof.metric} minus float32's: {difference}, margin "
        f"{100 * proof.margin:g}{unit}: {proof.verdict}{more}; {proof.reason}"
    )
    for seed, failure in enumerate(proof.failures):
        if failure is not None:
            yield f"seed {seed}: {failure}"
    if any(proof.skipped_steps):
        counts = ", ".join(map(str, proof.skipped_steps))
        yield f"steps skipped because a gradient overflowed, by seed: {counts}"
    if proof.step_time_ratio is not None:
        yield f"step time in these trainings: {proof.step_time_ratio:.3f} of float32's"


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


def times(ratio: float | None) -> str:
    """A ratio of times."""
    return "" if ratio is None else f"x{ratio:.2f}"
