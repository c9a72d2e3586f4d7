"""A search for ops, or for products of linear layers, on the terminal and as files.

The files are op lists as YAML, both lists in one, as `op_lists.lower_file` and `op_lists.fp32_file`
read them, with the reasons as comments; and layers, which `precision.layers_file` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, isnan
from typing import NamedTuple

from mprun.console.fitted_table import FittedTable, TableColumn, figure_column, text_column
from mprun.console.formatting import counted, joined, listed
from mprun.records.layer_values import PRODUCTS, layers_file
from mprun.records.mode_names import SHORT_DTYPES
from mprun.results.numerics_result import unjudged
from mprun.results.search_result import (
    Deviation,
    FormatRow,
    FormatSearch,
    Fp32Selection,
    OpSearch,
    Proof,
    SensitivityRow,
)

MAX_ROWS = 20
ELSEWHERE = "search_ops.json"


def op_search_parts(search: OpSearch) -> Iterator[FittedTable | str]:
    """The answer, ops and modules one at a time, the outcome, and which gradients do not count."""
    yield answer_sentence(search)
    for kind, rows in (("ops", search.ops), ("modules", search.modules)):
        if rows:
            yield rows_table(search, kind)
    yield outcome_table(search)
    yield from unjudged(search.unjudged_parameters, search.zero_gradients, search.reference)


def op_search_conclusion(search: OpSearch, proof: Proof | None) -> Iterator[str]:
    """What the proof showed, and what was left open."""
    if search.search is not None and not search.search.ops.is_within:
        yield "warning: the difference is above the tolerance even with every op in float32"
    if proof is not None:
        yield from proof_lines(proof)
    for sentence in search.unsettled:
        yield f"not settled, ended by {search.ended_by}: {sentence}"


def answer_sentence(search: OpSearch) -> str:
    """What has to stay in float32, by the measurements."""
    if search.search is None:
        return "No answer yet: the search ended before it had one."
    ops, modules = search.search.ops, search.search.modules
    if search.answer == "modules" and modules is not None:
        kept = _stay_clause(modules.fp32, "module")
        return f"{kept}; that leaves less there than the best list of ops ({joined(ops.fp32)})."
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
    return f"The {what}{plural} {joined(names)} {have} to stay in float32"


def rows_table(search: OpSearch, what: str) -> FittedTable:
    """The effect of each of `what`, ops or modules, the most harmful first."""
    rows: Sequence[SensitivityRow] = search.ops if what == "ops" else search.modules
    is_timed = any(row.time_ratio is not None for row in rows)
    return _effects_table(
        rows,
        what,
        SHORT_DTYPES[search.dtype],
        figure_column("calls", 0, lambda row: str(row.calls)),
        *([figure_column("time", 1, lambda row: times(row.time_ratio))] if is_timed else []),
    )


def _effects_table(
    rows: Sequence[SensitivityRow] | Sequence[FormatRow],
    what: str,
    low: str,
    first: TableColumn,
    *last: TableColumn,
) -> FittedTable:
    """What each of `rows` does alone in a lower precision, and all others do; worst first."""
    ordered = sorted(rows, key=lambda row: -row.harm_alone)
    more = len(rows) - MAX_ROWS
    return FittedTable(
        f"{what}, one at a time",
        text_column(what.removesuffix("s"), cell=lambda row: row.name),
        first,
        figure_column(f"only it {low}: loss", 4, lambda row: loss(row.alone)),
        figure_column(
            f"only it {low}: worst gradient", 5, lambda row: decibels(row.alone.worst_db)
        ),
        text_column("", cell=lambda row: "" if row.harm_alone <= 1 else "harmful"),
        figure_column("all but it: loss", 2, lambda row: loss(row.kept)),
        figure_column("all but it: worst gradient", 3, lambda row: decibels(row.kept.worst_db)),
        *last,
        rows=ordered[:MAX_ROWS],
        elsewhere=ELSEWHERE,
        caption=f"and {more} more, none more harmful, in {ELSEWHERE}" if more > 0 else "",
    )


class SearchOutcome(NamedTuple):
    """A row of an outcome: what is kept in a higher precision, and what that gives."""

    kept: str
    measure: Deviation | None
    time_ratio: float | None = None
    figure: str = ""
    """The share of numbers in float32, or the effective bits."""


def _outcomes_table(
    rows: Sequence[SearchOutcome], high: str, figure: str, *last: TableColumn
) -> FittedTable:
    """The outcomes of a search, side by side."""

    def of_measure(text: Callable[[Deviation], str]) -> Callable[[SearchOutcome], str]:
        return lambda row: "" if row.measure is None else text(row.measure)

    return FittedTable(
        "outcome",
        text_column(f"in {high}", cell=lambda row: row.kept),
        figure_column("loss", cell=of_measure(loss)),
        figure_column("gradients", 3, of_measure(lambda x: decibels(x.gradients_db))),
        figure_column("worst", 4, of_measure(lambda x: decibels(x.worst_db))),
        text_column("of", 1, cell=of_measure(lambda x: x.worst_parameter)),
        figure_column(figure, 5, lambda row: row.figure),
        *last,
        rows=rows,
        elsewhere=ELSEWHERE,
    )


def outcome_table(search: OpSearch) -> FittedTable:
    """Everything in the lower dtype, the configured casts and the results, side by side."""
    lower, given, lists = search.everything_lower, search.given, search.search
    rows = [
        SearchOutcome("all, weights rounded", search.unavoidable.measure),
        SearchOutcome("nothing", lower.measure, lower.time_ratio),
        SearchOutcome(f"as in {given.name}", given.measure, given.time_ratio),
    ]
    for what, row in () if lists is None else (("ops", lists.ops), ("modules", lists.modules)):
        if row is not None and (what == "ops" or row.is_within):
            names = ", ".join((*search.always, *row.fp32)) or "nothing"
            mark = " <-" if search.answer == what else ""
            share = f"{row.float32_share:.0%}"
            rows.append(SearchOutcome(f"{what}: {names}{mark}", row.measure, row.time_ratio, share))
    of_time = []
    if search.float32.time_ratio is not None:
        rows.append(SearchOutcome("everything", None, search.float32.time_ratio, "100%"))
        of_time = [figure_column("time", 2, lambda row: times(row.time_ratio))]
    return _outcomes_table(rows, "float32", "fp32 numbers", *of_time)


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


MAX_NAMES = 8
"""Up to this many layers are named in a sentence."""


def search_parts(search: FormatSearch) -> Iterator[FittedTable | str]:
    """The answer, the candidates one at a time, and the outcome."""
    yield format_sentence(search)
    if search.candidates:
        yield candidates_table(search)
    yield format_outcome_table(search)


def format_sentence(search: FormatSearch) -> str:
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
    return listed(texts, MAX_NAMES)


def _high_rows(search: FormatSearch) -> Sequence[FormatRow]:
    return [row for row in search.candidates if row.name in (search.high or ())]


def candidates_table(search: FormatSearch) -> FittedTable:
    """The effect of each candidate, the most harmful first."""
    operations = figure_column("operations", 1, lambda row: f"{row.operations:.1%}")
    return _effects_table(search.candidates, f"{_what(search)}s", search.format, operations)


def format_outcome_table(search: FormatSearch) -> FittedTable:
    """Everything in the format, nothing, and the result, side by side."""
    bits = search.effective_bits
    rows = [
        SearchOutcome("float32, weights moved by the format", search.unavoidable),
        SearchOutcome("nothing", search.everything, figure=f"{bits.everything:.2f}"),
        SearchOutcome("all linear layers", search.bfloat16, figure=f"{bits.bfloat16:.2f}"),
    ]
    if search.high and search.measure is not None and bits.answer is not None:
        name = f"answer: {counted(len(search.high), _what(search))}"
        rows.insert(2, SearchOutcome(name, search.measure, figure=f"{bits.answer:.2f}"))
    return _outcomes_table(rows, "bfloat16", "effective bits")


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


OPS, ALL_LOWER, LAYERS = "ops.yaml", "ops_all_lower.yaml", "layers.yaml"


def texts(search: OpSearch, config: str) -> dict[str, str]:
    """Name to content of the files: op lists; and layers, if modules are enough.

    Nothing if the search ended before the smallest list. `config` is for the comment at the top:
    `recipe mnist, precision fp16_mixed`.
    """
    if search.search is None:
        return {}
    ops, modules = search.search.ops, search.search.modules
    lines = {OPS: [*_head(search, config, ops), *_lists(search, ops.fp32)]}
    if modules is not None and modules.is_within:
        head = [*_head(search, config, modules)]
        beside = f"# For precision.layers_file={LAYERS}, beside this file."
        lines[ALL_LOWER] = [*head, beside, *_lists(search, ())]
        lines[LAYERS] = [*head, *_layers(search, modules.fp32)]
    return {name: "\n".join(text) + "\n" for name, text in lines.items()}


def comments(search: OpSearch, config: str) -> Iterator[str]:
    """Where the answer comes from, a line each, for files that are no lists; see `texts`."""
    if search.search is not None:
        ops, modules = search.search.ops, search.search.modules
        selection = modules if search.answer == "modules" and modules is not None else ops
        yield from (line.removeprefix("# ") for line in _head(search, config, selection))


def _head(search: OpSearch, config: str, selection: Fp32Selection) -> Iterator[str]:
    on, tolerance, low = search.measured_on, search.tolerance, search.dtype
    yield f"# Written by mprun search-ops: {config}."
    yield (
        f"# Measured against float32 on {on.batches} batches of {on.batch_size} samples "
        f"({on.split})."
    )
    gradients = tolerance.gradient_db
    gradient_text = (
        "" if gradients is None else f", every gradient's SQNR at least {gradients:.3g} dB"
    )
    yield f"# Tolerance: a loss {tolerance.loss:.2%} off{gradient_text}."
    yield f"# Weights of {low}'s precision alone: {deviation_text(search.unavoidable.measure)}."
    yield f"# Everything in {low}: {deviation_text(search.everything_lower.measure)}."
    yield f"# As listed here: {deviation_text(selection.measure)}."
    if not selection.is_within:
        yield "# THIS EXCEEDS THE TOLERANCE: no list meets it."


def _lists(search: OpSearch, fp32: Sequence[str]) -> Iterator[str]:
    rows = {row.name: row for row in search.ops}
    always = search.always
    yield "fp32:" + ("" if fp32 or always else " []  # no op needs it")
    yield from (f"  - {name}  # {_reason(search, rows[name])}" for name in fp32)
    yield from (f"  - {name}  # search_ops.always" for name in always)
    lower = [name for name in search.lower if name not in (*fp32, *always)]
    yield "lower:"
    yield from (f"  - {name}  # {_reason(search, rows[name])}" for name in lower if name in rows)
    yield "  # not in this model"
    yield from (f"  - {name}" for name in lower if name not in rows)


def _layers(search: OpSearch, modules: Sequence[str]) -> Iterator[str]:
    rows = {row.name: row for row in search.modules}
    yield from (f'"{name}": fp32  # {_reason(search, rows[name])}' for name in modules)


def _reason(search: OpSearch, row: SensitivityRow) -> str:
    harm = "" if row.harm_alone <= 1 else "harmful "
    return f"{harm}alone in {SHORT_DTYPES[search.dtype]}: {deviation_text(row.alone)}"
