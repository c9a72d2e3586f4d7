"""Which linear layers must stay in bfloat16, on the terminal and as a file."""

from __future__ import annotations

from collections.abc import Iterator

from mprun.compare.formatting import counted
from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.deviation import Deviation
from mprun.records.format_search_record import FormatSearch
from mprun.records.layer_values import layers_file
from mprun.report.search_ops_tables import ELSEWHERE, MOST_ROWS, decibels, loss, proof_lines


def search_parts(search: FormatSearch) -> Iterator[FittedTable | str]:
    """The answer, the layers one at a time, and the outcome."""
    yield answer_sentence(search)
    if search.layers:
        yield layers_table(search)
    yield outcome_table(search)


def answer_sentence(search: FormatSearch) -> str:
    """The result in one sentence."""
    every, name = len(search.layers), search.format
    if search.high is None or search.operations is None:
        return f"the search ended before it had a result, by {search.ended_by}"
    if not search.is_within:
        return f"no set of layers in bfloat16 keeps {name} within the tolerance"
    if not search.high:
        return f"all {counted(every, 'layer')} tolerate {name}"
    if len(search.high) == every:
        return f"no layer tolerates {name}: precision=bf16_mixed has the tolerated error"
    return (
        f"{len(search.high)} of {every} layers must stay in bfloat16: {', '.join(search.high)}; "
        f"{search.operations:.0%} of the operations of these layers keep {name}"
    )


def layers_table(search: FormatSearch) -> FittedTable:
    """The effect of each layer, the most harmful first."""
    table = FittedTable(
        "layers, one at a time",
        text_column("layer"),
        figure_column("operations", 1),
        figure_column(f"only it {search.format}: loss", 4),
        figure_column(f"only it {search.format}: worst gradient", 5),
        text_column(""),
        figure_column("all but it: loss", 2),
        figure_column("all but it: worst gradient", 3),
        elsewhere=ELSEWHERE,
    )
    rows = sorted(search.layers, key=lambda row: -row.harm_alone)
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
    """Every layer in the format, none, and the result, side by side."""
    table = FittedTable(
        "outcome",
        text_column("in bfloat16"),
        figure_column("loss"),
        figure_column("gradients", 1),
        figure_column("worst", 2),
        text_column("of", 0, narrow=16),
        elsewhere=ELSEWHERE,
    )

    def add(name: str, measure: Deviation) -> None:
        table.add_row(
            name,
            *(loss(measure), decibels(measure.gradients_db)),
            *(decibels(measure.worst_db), measure.worst_parameter),
        )

    add("float32, weights moved by the format", search.unavoidable)
    add("nothing", search.everything)
    if search.high and search.measure is not None:
        add(", ".join(search.high), search.measure)
    add("every layer", search.bfloat16)
    return table


def conclusion(search: FormatSearch) -> Iterator[str]:
    """What the proof showed, and what was left open."""
    if search.proof is not None:
        yield from proof_lines(search.proof)
    if search.ended_by is not None:
        yield f"not settled: {search.ended_by} ended it"


def layers_text(search: FormatSearch) -> str:
    """The file for `precision.layers_file`."""
    head = f"Layers that do not tolerate {search.format}, by mprun search-ops."
    return layers_file(head, dict.fromkeys(search.high or (), "bf16"))
