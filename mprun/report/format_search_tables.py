"""Which GEMMs of linear layers must stay in bfloat16, on the terminal and as a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mprun.compare.formatting import counted
from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.deviation import Deviation
from mprun.records.format_search_record import FormatRow, FormatSearch
from mprun.records.layer_values import PRODUCTS, layers_file
from mprun.report.search_ops_tables import ELSEWHERE, MOST_ROWS, decibels, loss, proof_lines

MOST_NAMES = 8
"""Up to this many layers are named in a sentence."""


def search_parts(search: FormatSearch) -> Iterator[FittedTable | str]:
    """The answer, the candidates one at a time, and the outcome."""
    yield answer_sentence(search)
    if search.candidates:
        yield candidates_table(search)
    yield outcome_table(search)


def answer_sentence(search: FormatSearch) -> str:
    """The result in one sentence."""
    every, bits = search.candidates, search.effective_bits
    if search.high is None or search.operations is None or bits.answer is None:
        return f"the search ended before it had a result, by {search.ended_by}"
    figures = _bits_clause(search, bits.answer)
    if bits.budget is not None:
        high = f"keep {_named(search)} in bfloat16" if search.high else "keep none in bfloat16"
        return (
            f"at most {bits.budget:g} effective bits: {high}, the least harm that was found, "
            f"{_within_clause(search)}; {figures}"
        )
    if not search.is_within:
        return f"no set of {_what(search)}s in bfloat16 keeps {search.format} within the tolerance"
    if not search.high:
        return f"all {counted(len(every), _what(search))} tolerate {search.format}: {figures}"
    if not search.keeps_a_format:
        return (
            f"no {_what(search)} tolerates {search.format}: precision=bf16_mixed has the tolerated "
            "error"
        )
    return (
        f"{len(search.high)} of {counted(len(every), _what(search))} must stay in bfloat16: "
        f"{_named(search)}; {search.operations:.0%} of the operations of these layers keep "
        f"{search.format}, {figures}"
    )


def _what(search: FormatSearch) -> str:
    return "GEMM" if search.per == "gemm" else search.per


def _bits_clause(search: FormatSearch, answer: float) -> str:
    bits = search.effective_bits
    everything = f", {bits.everything:.2f} with all in {search.format}" if search.high else ""
    return (
        f"{answer:.2f} effective bits over all linear layers (bfloat16 has {bits.bfloat16:g}"
        f"{everything})"
    )


def _within_clause(search: FormatSearch) -> str:
    if search.is_within:
        return "within the tolerance"
    return f"not within the tolerance ({search.harm:.1f} times as much)"


def _named(search: FormatSearch) -> str:
    """`fc1 (forward, grad_input), fc2`."""
    products: dict[str, list[str]] = {}
    for row in _high_rows(search):
        products.setdefault(row.layer, []).extend(row.products)
    texts = [
        layer if len(of) == len(PRODUCTS) else f"{layer} ({', '.join(sorted(of))})"
        for layer, of in products.items()
    ]
    more = len(texts) - MOST_NAMES
    return ", ".join(texts[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _high_rows(search: FormatSearch) -> Sequence[FormatRow]:
    return [row for row in search.candidates if row.name in (search.high or ())]


def candidates_table(search: FormatSearch) -> FittedTable:
    """The effect of each candidate, the most harmful first."""
    table = FittedTable(
        f"{_what(search)}s, one at a time",
        text_column(_what(search)),
        figure_column("operations", 1),
        figure_column(f"only it {search.format}: loss", 4),
        figure_column(f"only it {search.format}: worst gradient", 5),
        text_column(""),
        figure_column("all but it: loss", 2),
        figure_column("all but it: worst gradient", 3),
        elsewhere=ELSEWHERE,
    )
    rows = sorted(search.candidates, key=lambda row: -row.harm_alone)
    for row in rows[:MOST_ROWS]:
        table.add_row(
            row.name,
            f"{row.operations:.1%}",
            *(loss(row.alone), decibels(row.alone.worst_db)),
            "" if row.harm_alone <= 1 else "harmful",
            *(loss(row.kept), decibels(row.kept.worst_db)),
        )
    if (more := len(rows) - MOST_ROWS) > 0:
        table.caption = f"and {more} more, none more harmful, in {ELSEWHERE}"
    return table


def outcome_table(search: FormatSearch) -> FittedTable:
    """Everything in the format, nothing, and the result, side by side."""
    table = FittedTable(
        "outcome",
        text_column("in bfloat16"),
        figure_column("effective bits", 4),
        figure_column("loss"),
        figure_column("gradients", 1),
        figure_column("worst", 2),
        text_column("of", 0, narrow=16),
        elsewhere=ELSEWHERE,
    )

    def add(name: str, measure: Deviation, bits: float | None = None) -> None:
        table.add_row(
            name,
            "" if bits is None else f"{bits:.2f}",
            *(loss(measure), decibels(measure.gradients_db)),
            *(decibels(measure.worst_db), measure.worst_parameter),
        )

    bits = search.effective_bits
    add("float32, weights moved by the format", search.unavoidable)
    add("nothing", search.everything, bits.everything)
    if search.high and search.measure is not None:
        add(f"answer: {counted(len(search.high), _what(search))}", search.measure, bits.answer)
    add("all linear layers", search.bfloat16, bits.bfloat16)
    return table


def conclusion(search: FormatSearch) -> Iterator[str]:
    """What the proof showed, and what was left open."""
    if search.proof is not None:
        yield from proof_lines(search.proof)
    if search.ended_by is not None:
        yield f"not settled: {search.ended_by} ended it"


def layers_text(search: FormatSearch) -> str:
    """The file for `precision.layers_file`."""
    bits = search.effective_bits
    head = (
        f"GEMMs of linear layers that stay in bfloat16 with precision={search.format}, by "
        f"mprun search-ops.\n{bits.answer:.2f} effective bits; bfloat16 has {bits.bfloat16:g}."
    )
    return layers_file(head, search.layers or {})
