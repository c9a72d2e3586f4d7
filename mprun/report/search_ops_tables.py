"""A search for ops on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isnan

from mprun.compare.formatting import counted
from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.deviation import Deviation
from mprun.records.format_names import SHORT_DTYPES
from mprun.records.search_ops_record import OpSearch, Proof, SensitivityRow

MOST_ROWS = 20
ELSEWHERE = "search_ops.json"


def answer_sentence(search: OpSearch) -> str:
    """What has to stay in float32, by the measurements."""
    if search.search is None:
        return "No answer yet: the search ended before it had one."
    ops, modules = search.search.ops, search.search.modules
    if search.answer == "modules" and modules is not None:
        kept = _stay_clause(modules.fp32, "module")
        return f"{kept}; that leaves less there than the best list of ops ({_listed(ops.fp32)})."
    if not ops.is_within:
        return (
            "No list of ops is enough: with every op in float32 the difference is still too large."
        )
    if ops.fp32:
        return f"{_stay_clause(ops.fp32, 'op')}."
    other = " beside those of search_ops.always" if search.always else ""
    return f"No op{other} has to stay in float32."


def _stay_clause(names: Sequence[str], what: str) -> str:
    plural, have = ("", "has") if len(names) == 1 else ("s", "have")
    return f"The {what}{plural} {_listed(names)} {have} to stay in float32"


def _listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def rows_table(search: OpSearch, what: str) -> FittedTable:
    """The effect of each of `what`, ops or modules, the most harmful first."""
    rows: Sequence[SensitivityRow] = search.ops if what == "ops" else search.modules
    is_timed = any(row.time_ratio is not None for row in rows)
    alone, kept = f"only it {SHORT_DTYPES[search.dtype]}", "all but it"
    table = FittedTable(
        f"{what}, one at a time",
        text_column(what.removesuffix("s")),
        figure_column("calls", 1),
        figure_column(f"{alone}: loss", 5),
        figure_column(f"{alone}: worst gradient", 6),
        text_column(""),
        figure_column(f"{kept}: loss", 3),
        figure_column(f"{kept}: worst gradient", 4),
        *([figure_column("time", 2)] if is_timed else []),
        elsewhere=ELSEWHERE,
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
        table.caption = f"and {more} more, none more harmful, in {ELSEWHERE}"
    return table


def outcome_table(search: OpSearch) -> FittedTable:
    """Everything in the lower dtype, the configured casts and the results, side by side."""
    is_timed = search.float32.time_ratio is not None
    table = FittedTable(
        "outcome",
        text_column("in float32"),
        figure_column("loss"),
        figure_column("gradients", 3),
        figure_column("worst", 4),
        text_column("of", 1, narrow=16),
        figure_column("fp32 numbers", 5),
        *([figure_column("time", 2)] if is_timed else []),
        elsewhere=ELSEWHERE,
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
