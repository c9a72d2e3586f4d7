"""A comparison as files: a page, Markdown to paste, CSV and JSON for programs.

The page is one self-contained HTML file: no script, no font, no image file. A record may come from
someone else, so jinja2 escapes everything in it. Only the style sheet of this package and the
drawings, whose text is already escaped, are inserted without escaping.

CSV and JSON contain the plain numbers at full precision: fractions, ratios, milliseconds, bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from mprun.errors import UsageError
from mprun.records.console import fitted_table
from mprun.records.console.fitted_table import FittedTable
from mprun.records.console.formatting import counted
from mprun.records.files import jsonable, write_atomic
from mprun.records.result import Result
from mprun.records.run_record import MEMORY_CATEGORIES, backend_text
from mprun.study.compare.comparison import Comparison, EqualQuality, Estimate, Interval, Variant
from mprun.study.report import answer, cells, tables
from mprun.study.report.canvas import DARK, LIGHT, Plot, declarations
from mprun.study.report.cells import TONES, plain
from mprun.study.report.comparison_report import (
    comparison_table,
    footer,
    published,
    published_line,
    quantities_table,
)
from mprun.study.report.plots import NAMES, draw

SCHEMA_VERSION = 1  # Of comparison.json
PNG_NAME = "comparison-{}.png"
SHOWN_MEMORY = ("peak", *MEMORY_CATEGORIES)
# The sign before a verdict, for readers who do not see its colour
SIGNS = {"better": "+", "equivalent": "=", "worse": "\u2212", "inconclusive": "?"}
MEMORY = (*SHOWN_MEMORY, "data", "allocator_peak")  # Columns of comparison.csv


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write report.html, comparison.md, .csv and .json, and the plots as PNGs.

    Each file is replaced as a whole. Plots of an earlier report that this comparison does not have
    are removed, so that they are not mistaken for plots of this report. The paths written are
    returned, report.html first.
    """
    plots = draw(comparison)
    files = {
        # "replace": a label of a damaged record may have lone surrogates, which UTF-8 has not
        "report.html": page(comparison, plots).encode(errors="replace"),
        "comparison.md": markdown(comparison).encode(errors="replace"),
        "comparison.csv": csv_text(comparison).encode(errors="replace"),
        "comparison.json": json_text(comparison).encode(errors="replace"),
        **{PNG_NAME.format(plot.name): plot.png for plot in plots if plot.png},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomic(folder / name, data)
        for name in NAMES:
            if PNG_NAME.format(name) not in files:
                (folder / PNG_NAME.format(name)).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"compare.dir={folder} cannot be written ({error.strerror}); choose another folder, "
            "or compare.report=false"
        ) from None
    return [folder / name for name in files]


def pictures(comparison: Comparison, names: Sequence[str] = ()) -> dict[str, str]:
    """The plots of the report with these names, all if there is none, as SVGs by their captions."""
    colours = f"{declarations(LIGHT)} --sans: sans-serif; background: var(--paper)"
    return {
        f"{plot.title}: {' '.join((plot.caption, *plot.notes))}": plot.svg.replace(
            "<svg ", f'<svg style="{colours}" ', 1
        )
        for plot in draw(comparison, names=names or NAMES)
        if plot.svg
    }


def page(comparison: Comparison, plots: list[Plot]) -> str:
    """The whole page, with the plots of `draw` in their order."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    sentences = ["", *answer.variant_sentences(comparison)]
    parts = (comparison.variants, cells.rows(comparison), sentences)
    return environment.from_string(_resource("report.html")).render(
        c=comparison,
        variants=list(zip(*parts, strict=True)),
        headings=cells.headings(comparison),
        plots=plots,
        published=published(comparison),
        memory_names=SHOWN_MEMORY,
        tones=TONES,
        signs=SIGNS,
        answer=answer,
        cells=cells,
        counted=counted,
        details=_details,
        # Markup is not escaped: these are texts of this package, without any of a record
        style=Markup(_resource("report.css")),
        light=Markup(declarations(LIGHT)),
        dark=Markup(declarations(DARK)),
    )


def _shown(value: Any) -> str:
    """What the page shows of a value: one line, without a break between a number and its `%`."""
    if isinstance(value, Markup):
        return value
    return plain(str(value)).replace(" %", "\u00a0%")


def _resource(name: str) -> str:
    return resources.files("mprun.study.report").joinpath(name).read_text(encoding="utf-8")


def _details(variant: Variant) -> list[tuple[str, str]]:
    if not variant.runs:
        return []
    summary = variant.runs[0].summary
    batch, backend = summary.batch, summary.backend
    details = [
        ("policy", tables.policy(summary.effective)),
        ("execution", variant.execution),
        ("batch", f"{batch.micro} x {batch.accumulate} = {batch.effective}"),
        (
            "backend",
            f"{backend_text(backend)}, {counted(backend.threads, 'thread')}",
        ),
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for x in summary.substitutions:
        reasons.setdefault((x.dtype, x.reason), []).append(x.op)
    details += [
        ("substituted", f"{', '.join(ops)} in {dtype}: {reason}")
        for (dtype, reason), ops in reasons.items()
    ]
    return details + [("run", f"seed {run.summary.seed}: {run.path}") for run in variant.runs]


def markdown(comparison: Comparison) -> str:
    """What the terminal shows in full, and the published figures."""
    parts: list[FittedTable | str] = [
        *answer.headline(comparison),
        *answer.quantity_sentences(comparison),
        comparison_table(comparison),
        *quantities_table(comparison),
        *answer.advice_lines(comparison)[1:],  # the first is the headline
        *footer(comparison),
        *map(published_line, published(comparison)),
    ]
    return Result(comparison, parts).markdown


def csv_text(comparison: Comparison) -> str:
    """A row for each variant; missing figures are empty."""
    rows = [_record(variant) for variant in comparison.variants]  # all have the same columns
    cells_of = ([plain(x) if isinstance(x, str) else x for x in row.values()] for row in rows)
    return fitted_table.csv_text([list(rows[0]) if rows else ["label"], *cells_of])


def _record(variant: Variant) -> dict[str, Any]:
    step, verdict = variant.step_time_ms, variant.verdict
    return {
        "label": variant.label,
        "variant_hash": variant.variant_hash,
        "precision": variant.precision,
        "execution": variant.execution,
        "substituted": variant.substituted,
        "runs": len(variant.runs),
        "seeds": " ".join(str(run.summary.seed) for run in variant.runs),
        "failed": len(variant.failed),
        "step_time_ms_median": step and step.median,
        "step_time_ms_p10": step and step.p10,
        "step_time_ms_p90": step and step.p90,
        **_estimate("step_time_ratio", variant.step_time_ratio),
        "samples_per_second": variant.samples_per_second,
        **_estimate("throughput_ratio", variant.throughput_ratio),
        "no_time_verdict": variant.no_time_verdict,
        **_equal_quality(variant.equal_quality),
        "artefacts": " ".join(artefact.cause for artefact in variant.artefacts),
        **{f"memory_{name}_bytes": variant.memory_bytes.get(name) for name in MEMORY},
        "memory_ratio": variant.memory_ratio,
        **_estimate("metric", variant.metric),
        **_estimate("difference", variant.difference),
        **_interval("equivalence", variant.equivalence),
        "verdict": verdict.word,
        **_interval("verdict", verdict.interval),
        "verdict_level": verdict.level,
        "more_seeds": verdict.more_seeds,
        "reason": verdict.reason,
    }


def _equal_quality(quality: EqualQuality | None) -> dict[str, Any]:
    prefix = "equal_quality"
    return {
        f"{prefix}_samples": quality and quality.samples,
        **_estimate(f"{prefix}_samples_ratio", quality.samples_ratio if quality else None),
        f"{prefix}_seconds": quality and quality.seconds,
        **_estimate(f"{prefix}_time_ratio", quality.time_ratio if quality else None),
        f"{prefix}_missed": quality and quality.missed,
    }


def _estimate(name: str, estimate: Estimate | None) -> dict[str, Any]:
    value, interval, n = estimate or (None, None, None)
    return {name: value, **_interval(name, interval), f"{name}_n": n}


def _interval(name: str, interval: Interval | None) -> dict[str, Any]:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def json_text(comparison: Comparison) -> str:
    """Everything, with the runs' summaries, under the names of `mprun.study.compare.comparison`.

    Published figures are added as `published`.
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        **_plain(comparison),
        "published": [
            {"what": x.what, "published": x.text, "hardware": x.hardware, "source": x.source}
            for x in published(comparison)
        ],
    }
    # `jsonable` makes "nan" of a NaN: strict readers of JSON refuse a bare one
    return json.dumps(jsonable(content), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Dataclasses and named tuples as objects, paths as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value
