"""Published figures beside those measured here; no verdict uses them.

Apart from `exports.py`, since the terminal shows them too and must not import jinja2 or matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from mprun.records.console.formatting import counted
from mprun.records.published_figures import Figure, figures
from mprun.records.run_record import Number, Scores, Summary, number
from mprun.study.compare.comparison import Comparison, Variant
from mprun.study.report import cells

NOT_JUDGED = "published, used in no verdict"
PUBLISHED_HEADINGS = ("figure", "published", "on", "source", "measured here")


class PublishedRow(NamedTuple):
    """A row of the table of published figures."""

    what: str
    published: str
    hardware: str
    source: str
    here: str  # The measured figure of each variant in that mode; `-` without one


def published_rows(comparison: Comparison) -> list[PublishedRow]:
    """Every published figure about the recipe, or about a mode, of a comparison."""
    return [
        PublishedRow(f.what, f.text, f.hardware, f.source, _measured_here(comparison, f))
        for f in _published(comparison)
    ]


def published_lines(comparison: Comparison) -> list[str]:
    """A line for each kind of figure that is also measured here, without single epochs."""
    groups: dict[str, list[Figure]] = {}
    for figure in _published(comparison):
        if figure.kind != "other" and figure.epoch is None:
            groups.setdefault(figure.what, []).append(figure)
    lines = []
    for what, members in groups.items():
        texts = "; ".join(f"{f.text} ({f.hardware}; {f.source})" for f in members)
        measured = (x for f in members if (x := _measured_here(comparison, f)) != cells.NONE)
        here = next(measured, cells.NONE)
        lines.append(f"{NOT_JUDGED}: {what}: {texts}; measured here: {here}")
    return lines


def _published(comparison: Comparison) -> list[Figure]:
    summaries = [run.summary for v in comparison.variants for run in (*v.runs, *v.failed)]
    precisions = {variant.precision for variant in comparison.variants}
    recipes = {summary.recipe for summary in summaries}
    return figures(recipes, precisions, {summary.data.name for summary in summaries})


def _measured_here(comparison: Comparison, figure: Figure) -> str:
    texts = []
    for variant in comparison.variants:
        ours = [run.summary for run in variant.runs if _is_of(run.summary, figure)]
        if ours and (text := _measured(comparison, variant, ours, figure)):
            texts.append(f"{cells.plain(variant.label)} {text}{_settings(ours, figure)}")
    return ", ".join(texts) or cells.NONE


def _is_of(summary: Summary, figure: Figure) -> bool:
    is_recipe = figure.recipe in (None, summary.recipe)
    is_data = figure.data in (None, summary.data.name)
    return is_recipe and is_data and summary.precision in figure.precisions


def _settings(summaries: Iterable[Summary], figure: Figure) -> str:
    """In brackets, what the runs did otherwise than the published one."""
    settings: dict[str, None] = {}  # an ordered set
    for summary in summaries:
        if figure.batch_size not in (None, summary.batch_size):
            settings[f"batch {summary.batch_size}"] = None
        epochs = summary.epochs
        if epochs is not None and figure.epochs not in (None, epochs):
            settings[counted(epochs, "epoch")] = None
        if figure.steps not in (None, summary.steps):
            settings[counted(summary.steps, "step")] = None
        if summary.data.source == "generated":
            settings["generated data"] = None
    return f" ({', '.join(settings)})" if settings else ""


def _measured(
    comparison: Comparison, variant: Variant, summaries: list[Summary], figure: Figure
) -> str:
    """The figure of a variant, with its interval if the comparison has one; else nothing."""
    kind, baseline = figure.kind, comparison.variants[0]
    if kind in _SCORES:
        values = [x for s in summaries if (x := _score(s, figure)) is not None]
        finite = [x for x in values if math.isfinite(x)]
        return f"{fmean(finite):.4f}" if finite else ""
    if kind == "time_per_sample":
        return _time_per_sample(variant)
    # Published speed, memory and differences are relative to fp32
    if baseline.precision != "fp32" or variant is baseline:
        return ""
    if kind == "speed":
        return _speed(variant)
    if kind == "memory":
        return "" if variant.memory_ratio is None else cells.times(variant.memory_ratio)
    if kind == "accuracy_difference" and comparison.split == "test" and variant.difference:
        return cells.difference_text(comparison, variant.difference.value)
    return ""


def _time_per_sample(variant: Variant) -> str:
    if cells.is_emulated(variant):
        return "EMULATED"
    rate = variant.samples_per_second
    return f"{1e6 / rate:.3g} us{_mark(variant)}" if rate else ""  # microseconds per sample


def _speed(variant: Variant) -> str:
    if cells.is_emulated(variant):
        return "EMULATED"
    ratio = variant.throughput_ratio
    if ratio is None:
        return ""
    interval = cells.span(ratio.interval, "{:.2f}")
    of = f"95 % interval {interval}, n={ratio.n}" if interval else f"n={ratio.n}"
    return f"{cells.times(ratio.value)} [{of}]{_mark(variant)}"


def _mark(variant: Variant) -> str:
    return f" {cells.plain(variant.substituted)}" if variant.substituted else ""


_SCORES = (
    "train_accuracy",
    "validation_accuracy",
    "validation_loss",
    "test_accuracy",
    "test_loss",
)


def _score(summary: Summary, figure: Figure) -> float | None:
    """The measured accuracy or loss of a run; None if the run has none, or not that epoch."""
    split, _, name = figure.kind.partition("_")
    scores: Scores | None = summary.test
    if split != "test":
        epoch = next(
            (e for e in reversed(summary.history) if figure.epoch in (None, e.epoch)), None
        )
        scores = getattr(epoch, split, None)
    value: Number | None = None if scores is None else scores.value(name)
    return None if value is None else number(value)
