"""A search for ops, or for products of linear layers, on the terminal and as files.

The files are op lists as YAML, both lists in one, as `op_lists.lower_file` and `op_lists.fp32_file`
read them, with the reasons as comments; and layers, which `precision.layers_file` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isnan

from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.console.formatting import counted
from mprun.records.mode_names import PRODUCTS, SHORT_DTYPES, layers_file
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
    for row in rows[:MAX_ROWS]:
        table.add_row(
            row.name,
            str(row.calls),
            *(loss(row.alone), decibels(row.alone.worst_db)),
            "" if row.harm_alone <= 1 else "harmful",
            *(loss(row.kept), decibels(row.kept.worst_db)),
            *([times(row.time_ratio)] if is_timed else []),
        )
    if (more := len(rows) - MAX_ROWS) > 0:
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
    more = len(texts) - MAX_NAMES
    return ", ".join(texts[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


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
    for row in rows[:MAX_ROWS]:
        table.add_row(
            row.name,
            f"{row.operations:.1%}",
            *(loss(row.alone), decibels(row.alone.worst_db)),
            "" if row.harm_alone <= 1 else "harmful",
            *(loss(row.kept), decibels(row.kept.worst_db)),
        )
    if (more := len(rows) - MAX_ROWS) > 0:
        table.caption = f"and {more} more, none more harmful, in {ELSEWHERE}"
    return table


def format_outcome_table(search: FormatSearch) -> FittedTable:
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
