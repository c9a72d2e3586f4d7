"""The report as one self-contained HTML page: no script, no font, no image file.

A record may come from someone else, so jinja2 escapes everything in it. Only the style sheet of
this package and the drawings, whose text is already escaped, are inserted without escaping.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from mprun.compare.comparison import Comparison, Variant
from mprun.console.formatting import counted
from mprun.records.run_record import MEMORY_CATEGORIES
from mprun.report import answer, cells, tables
from mprun.report import published_rows as published
from mprun.report.cells import plain
from mprun.report.comparison_report import configs
from mprun.report.plots.canvas import Plot, key
from mprun.report.theme import DARK, LIGHT, TONES, declarations

FOLDER = "mprun.report"


class VariantView(NamedTuple):
    """The parts of a variant on the page."""

    label: str
    key: Markup
    """Its marker, as in the plots."""
    word: str
    tone: str
    row: cells.VariantCells
    sentence: str
    reason: str
    details: tuple[tuple[str, str], ...]
    memory: tuple[str, ...]


def page(comparison: Comparison, plots: list[Plot]) -> str:
    """The whole page, with the plots of `mprun.report.plots.draw` in their order."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["sentence"] = lambda text: text.replace(" %", "\u00a0%")
    template = environment.from_string(_resource("report.html"))
    return template.render(**_context(comparison, plots))


def _resource(name: str) -> str:
    return resources.files(FOLDER).joinpath(name).read_text(encoding="utf-8")


def _context(comparison: Comparison, plots: list[Plot]) -> dict[str, Any]:
    runs = [run for v in comparison.variants for run in (*v.runs, *v.failed)]
    started = sorted(run.summary.started_at for run in runs)
    return {
        "recipe": plain(comparison.recipe),
        "metric_name": cells.metric_name(comparison),
        "counted": counted,
        "data": plain(comparison.data),
        "baseline": plain(comparison.baseline),
        "margin": cells.difference_text(comparison, comparison.margin, signed=False),
        "is_relative": comparison.is_relative,
        "runs": sum(len(v.runs) for v in comparison.variants),
        "first": plain(started[0], 40) if started else "",
        "last": plain(started[-1], 40) if started else "",
        "headline": answer.headline(comparison),
        "advice": answer.advice_lines(comparison)[1:],
        "headings": cells.headings(comparison),
        "variants": _variants(comparison),
        "memory_unit": cells.memory_unit(comparison)[0],
        "memory_headings": ("peak", *MEMORY_CATEGORIES),
        "plots": [(plot, Markup(plot.svg)) for plot in plots],
        "published": published.rows(comparison),
        "published_headings": published.HEADINGS,
        "configs": configs(comparison),
        "hardware": plain(comparison.hardware),
        "code": plain(comparison.code),
        "versions": _versions(comparison),
        "warnings": [plain(warning) for warning in comparison.warnings],
        "notes": [plain(note) for note in comparison.notes],
        "failures": answer.failures(comparison),
        "skipped": [(plain(str(x.path)), plain(x.reason)) for x in comparison.skipped],
        "style": Markup(_resource("report.css")),
        "light": Markup(declarations(LIGHT)),
        "dark": Markup(declarations(DARK)),
    }


def _variants(comparison: Comparison) -> list[VariantView]:
    sentences = ["", *(f.sentence for f in answer.variant_sentences(comparison))]
    rows = cells.rows(comparison)
    return [
        VariantView(
            label=rows[place].label[0],
            key=Markup(key(place, cells.is_emulated(variant))),
            word=variant.verdict.word,
            tone=TONES.get(variant.verdict.word, "none"),
            row=rows[place],
            sentence=sentences[place],
            reason=plain(variant.verdict.reason),
            details=tuple(_details(variant)),
            memory=tuple(
                cells.memory(comparison, variant.memory_bytes.get(name))
                for name in ("peak", *MEMORY_CATEGORIES)
            ),
        )
        for place, variant in enumerate(comparison.variants)
    ]


def _details(variant: Variant) -> list[tuple[str, str]]:
    if not variant.runs:
        return []
    summary = variant.runs[0].summary
    batch, backend = summary.batch, summary.backend
    details = [
        ("policy", plain(tables.policy(summary.effective))),
        ("execution", variant.execution),
        ("batch", f"{batch.micro} x {batch.accumulate} = {batch.effective}"),
        (
            "backend",
            f"{backend.memory_format}, {backend.optimizer_impl} optimizer, "
            f"{counted(backend.threads, 'thread')}{', compiled' if backend.compile else ''}",
        ),
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for x in summary.substitutions:
        reasons.setdefault((x.dtype, x.reason), []).append(x.op)
    details += [
        ("substituted", f"{', '.join(ops)} in {dtype}: {reason}")
        for (dtype, reason), ops in reasons.items()
    ]
    details += [("run", f"seed {run.summary.seed}: {run.path}") for run in variant.runs]
    return [(name, plain(text)) for name, text in details]


def _versions(comparison: Comparison) -> list[tuple[str, str]]:
    """Each package's version, or versions if runs differ."""
    versions_of: dict[str, dict[str, None]] = {}
    for variant in comparison.variants:
        for run in variant.runs:
            summary = run.summary
            versions = {"mprun": summary.mprun_version, **summary.versions}
            for name, version in {**versions, "commit": summary.git_commit}.items():
                versions_of.setdefault(plain(name, 40), {})[plain(version or "none", 60)] = None
    return [(name, ", ".join(versions)) for name, versions in versions_of.items()]
