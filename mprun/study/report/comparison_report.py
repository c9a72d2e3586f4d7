"""A comparison on the terminal, in short and in full.

The short form has a line for each variant and the most important notes, each once for all variants
that it holds for; the full one has everything. `exports` makes the files. Published figures are
shown with both; no verdict uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mprun.records.console.fitted_table import (
    ALWAYS,
    FittedTable,
    TableCell,
    TableColumn,
    figure_column,
    text_column,
)
from mprun.records.console.formatting import by_reason, counted, listed
from mprun.records.published_figures import Figure, figures
from mprun.study.compare.comparison import KEEPS, Advice, Comparison, QuantityVerdict
from mprun.study.compare.equal_quality import is_faster_per_sample, judge_equal_quality
from mprun.study.compare.notes import SUBSTITUTED, is_in_table
from mprun.study.compare.statistics import CONFIDENCE, MAX_SEEDS
from mprun.study.report import answer, cells
from mprun.study.report.cells import TONES, plain

TERMINAL = {"good": "green", "bad": "red", "open": "yellow"}  # Roles to the terminal's own colours
LABEL_WIDTH = 12  # `fp16_mixed` stays whole; longer labels are broken before figures are left out
# The column with the least is the first that a narrow table leaves out
IMPORTANCE = {
    "runs": 1,
    "samples": 2,
    "step_time": 3,
    "metric": 4,
    "memory": 5,
    "ratio": 6,
    "difference": 7,
}


def comparison_table(comparison: Comparison) -> FittedTable:
    """A row for each variant; figures with their interval, or ratio, on a second line."""
    count = counted(len(comparison.variants), "variant")
    columns = []
    for name, heading in cells.headings(comparison)._asdict().items():
        is_text = name in ("label", "verdict")
        importance = IMPORTANCE.get(name, ALWAYS)
        columns.append(
            TableColumn(_lines(heading), importance, is_text, not is_text, narrow=LABEL_WIDTH)
        )
    title = f"{plain(comparison.recipe)}: {count}"
    table = FittedTable(title, *columns, elsewhere="comparison.csv of the report")
    for row, variant in zip(cells.rows(comparison), comparison.variants, strict=True):
        *figures, verdict = map(_lines, row)
        tone = TERMINAL.get(TONES.get(variant.verdict.word, ""), "")
        table.add_row(*figures, TableCell(verdict, tone))
    return table


def _lines(figure: tuple[str, str]) -> str:
    """A figure and its interval or ratio below; a level in brackets has a line of its own."""
    first, second = figure
    return "\n".join(filter(None, (first, *second.replace(" (", "\n(").split("\n"))))


def short_table(comparison: Comparison) -> FittedTable:
    """A line for each variant: intervals stand beside their figures, spreads are left out.

    Where batches differ, samples per second are compared, not steps.
    """
    variants = comparison.variants
    # A step of a doubled batch takes longer, and trains more
    rates = len({run.summary.batch_size for v in variants for run in v.runs}) > 1
    counts = sorted({len(v.runs) + len(v.failed) for v in variants})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if counts[1:] else counted(counts[0], "seed")
    substituted = by_reason({plain(v.label): v.substituted for v in variants if v.substituted})
    table = FittedTable(
        f"{plain(comparison.recipe)}: {counted(len(variants), 'variant')}, {seeds} each; "
        f"{answer.margin_text(comparison)}",
        text_column("variant"),
        figure_column("step ms", 2),
        TableColumn(f"{'samples/s' if rates else 'time'} ratio\n[95 %]", 6, is_text=False),
        figure_column(f"peak {cells.memory_unit(comparison)[0]}", 1),
        figure_column("peak ratio", 3),
        figure_column(cells.headings(comparison).metric[0], 4),
        TableColumn(_difference_heading(comparison), 7, is_text=False),
        text_column("verdict", narrow=LABEL_WIDTH),
        elsewhere="comparison.csv of the report",
        caption="; ".join(
            f"* {plain(ops)}, as {SUBSTITUTED}: no gain in time is claimed" for ops in substituted
        ),
    )
    for row, v in zip(cells.rows(comparison), variants, strict=True):
        interval, _ = cells.deciding(v)
        ratio = cells.beside(*(cells.time_ratio(v, v.throughput_ratio) if rates else row.ratio))
        span = ""
        if interval is not None and row.difference[0] != cells.NONE:
            span = cells.difference_span(comparison, interval)
        table.add_row(
            row.label[0],
            row.step_time[0],
            ratio + (" *" if v.substituted else ""),
            row.memory[0],
            row.memory[1] or cells.NONE,
            row.metric[0],
            cells.beside(row.difference[0], span),
            TableCell(v.verdict.word, TERMINAL.get(TONES.get(v.verdict.word, ""), "")),
        )
    return table


def quantities_table(comparison: Comparison) -> list[FittedTable]:
    """A row for each quantity and variant; no table without quantities."""
    rows = comparison.quantities
    if not rows:
        return []
    return [
        FittedTable(
            "quantities (an error is the one against the truth, relative)",
            text_column("quantity", 4, cell=lambda row: plain(row.quantity)),
            text_column("variant", cell=lambda row: plain(row.variant)),
            figure_column("value", 3, _quantity_figure),
            figure_column("difference % [95 %]", 2, _quantity_difference),
            figure_column("margin %", 1, lambda row: f"{100 * row.margin:.3g}"),
            text_column("verdict", cell=lambda row: row.word),
            rows=rows,
            elsewhere="comparison.json of the report",
        )
    ]


def _quantity_figure(row: QuantityVerdict) -> str:
    if row.figure is None:
        return cells.NONE
    return f"{'error ' * row.is_error}{row.figure.value:.4g}"


def _quantity_difference(row: QuantityVerdict) -> str:
    if row.difference is None:
        return cells.NONE
    value, around, _ = row.difference
    span = f" [{100 * around.low:+.2g}, {100 * around.high:+.2g}]" if around else ""
    return f"{100 * value:+.2g}{span}"


def _difference_heading(comparison: Comparison) -> str:
    """`points`, and below it the levels of the intervals that decided: `[90 to 97.5 %]`."""
    judged = [v for v in comparison.variants[1:] if v.difference and cells.deciding(v)[0]]
    levels = sorted({v.verdict.level or CONFIDENCE for v in judged})
    texts = list(dict.fromkeys(f"{100 * x:.3g}" for x in (*levels[:1], *levels[-1:])))
    unit = "difference %" if comparison.is_relative else "points"
    return f"{unit}\n[{' to '.join(texts)} %]" if texts else unit


MOST_NOTES = 5  # More would push the answer off a screen; --verbose shows all


def short_notes(comparison: Comparison) -> list[str]:
    """Every note in short, the most important first, each once for all variants it holds for."""
    advice = comparison.advice
    return [
        *_failed(comparison),
        *(_not_taken(comparison, advice) if advice else _not_settled(comparison)),
        *_untimed(comparison),
        *_skipped_in_short(comparison),
        *(f"note: {plain(note)}" for note in (advice.notes if advice else ())),
        *(f"note: {plain(note)}" for note in comparison.notes if not is_in_table(note)),
    ]


def _failed(comparison: Comparison) -> Iterator[str]:
    """Which runs failed, and why the first one did."""
    failed = [v for v in comparison.variants if v.failed]
    if failed:
        counts = [
            f"{plain(v.label)} {len(v.failed)} of {counted(len(v.runs) + len(v.failed))}"
            for v in failed
        ]
        reason = plain(failed[0].failed[0].summary.error or "no reason recorded", 80)
        yield f"failed: {listed(counts, 3)}; the first: {reason}"


def _not_settled(comparison: Comparison) -> Iterator[str]:
    """What is worse for another reason than its mean; what would settle an open verdict."""
    worse = {
        plain(v.label): plain(v.verdict.reason)
        for v in comparison.variants
        if v.verdict.word == "worse" and v.verdict.interval is None and not v.failed
    }
    if worse:
        yield f"worse: {_grouped(worse)}"
    reasons = {}
    for label, verdict in ((plain(v.label), v.verdict) for v in comparison.variants):
        if verdict.more_seeds:
            reasons[label] = f"about {counted(verdict.more_seeds, 'more seed')}"
        elif verdict.word == "inconclusive":
            decided = verdict.interval is not None  # else the reason is a missing seed
            reasons[label] = f"over {MAX_SEEDS} more seeds" if decided else plain(verdict.reason)
    if reasons:
        yield f"not settled: {_grouped(reasons)}"


def _untimed(comparison: Comparison) -> Iterator[str]:
    """Whose times have no verdict because of an artefact, and whose speed may buy nothing."""
    causes = {
        plain(v.label): f"{v.artefacts[0].cause.replace('_', ' ')}; {v.artefacts[0].remedy}"
        for v in comparison.variants
        if v.artefacts
    }
    for cause, names in by_reason(causes).items():
        yield f"note: no verdict on the times of {', '.join(names)}: {cause}"
    undecided = [
        plain(v.label)
        for v in comparison.variants[1:]
        if v.verdict.word in KEEPS and is_faster_per_sample(v) and judge_equal_quality(v) == "open"
    ]
    if undecided:
        yield f"note: open whether speed is gained to equal validation loss: {', '.join(undecided)}"


def _skipped_in_short(comparison: Comparison) -> Iterator[str]:
    skipped = comparison.skipped
    if len(skipped) == 1:
        yield from _skipped(comparison)
    elif skipped:
        reasons = Counter(plain(x.reason) for x in skipped).most_common()
        kinds = listed([f"{count} x {reason}" for reason, count in reasons], 2)
        yield f"skipped {len(skipped)} folders: {kinds}"


def _skipped(comparison: Comparison) -> list[str]:
    return [f"skipped {plain(str(x.path))}: {plain(x.reason)}" for x in comparison.skipped]


def _not_taken(comparison: Comparison, advice: Advice) -> Iterator[str]:
    """The modes that are not advised, those tried and those not tried, each with its reason."""
    # `inconclusive: about 3 more seeds` is short already, and its number is wanted
    words = {v.label: str(v.verdict) for v in comparison.variants if v.verdict.more_seeds}
    rejected = {
        plain(label): words.get(label) or _in_short(reason)
        for label, reason in advice.rejected.items()
        if label != comparison.baseline
    }
    if rejected:
        yield f"not taken: {_grouped(rejected)}"
    reasons = by_reason({plain(k): _in_short(reason) for k, reason in advice.not_tried.items()})
    if reasons:
        yield "; ".join(f"not tried ({why}): {', '.join(x)}" for why, x in reasons.items())


def _in_short(reason: str) -> str:
    return plain(reason.partition(": ")[0], 80)  # `advise` writes the reason in short first


def _grouped(reasons: Mapping[str, str]) -> str:
    """`a, b (reason), c (another reason)`."""
    groups = by_reason(reasons).items()
    return ", ".join(f"{', '.join(names)} ({reason})" for reason, names in groups)


def footer(comparison: Comparison) -> list[str]:
    """Lines below the table, as plain text without rich markup: all that the comparison says."""
    return [
        *(f"warning: {plain(warning)}" for warning in comparison.warnings),
        *(
            f"{plain(v.label)} {v.verdict.word}: {plain(v.verdict.reason)}"
            for v in comparison.variants[1:]
            if v.verdict.word != "equivalent"
        ),
        *(
            f"{plain(variant.label)} {sentence}"
            for variant, sentence in zip(
                comparison.variants[1:], answer.variant_sentences(comparison), strict=True
            )
        ),
        *answer.terms(comparison),
        *(f"note: {plain(note)}" for note in comparison.notes),
        *(f"failed: {line}" for line in answer.failures(comparison)),
        *_skipped(comparison),
    ]


# ---- published figures ---------------------------------------------------------------------------


def published(comparison: Comparison) -> list[Figure]:
    """Every published figure about the recipe, or about a mode, of a comparison."""
    summaries = [run.summary for v in comparison.variants for run in (*v.runs, *v.failed)]
    precisions = {variant.precision for variant in comparison.variants}
    return figures({summary.recipe for summary in summaries}, precisions)


def published_line(figure: Figure) -> str:
    """A figure with its source, as text."""
    return (
        f"published, used in no verdict: {figure.what}: {figure.text} ({figure.hardware}; "
        f"{figure.source})"
    )
