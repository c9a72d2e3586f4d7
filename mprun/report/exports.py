"""A comparison as files: Markdown to paste, CSV and JSON for programs.

CSV and JSON contain the plain numbers at full precision: fractions, ratios, milliseconds, bytes.
"""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from mprun.compare.comparison import Comparison, EqualQuality, Estimate, Interval, Variant
from mprun.records.files import jsonable
from mprun.records.run_record import MEMORY_CATEGORIES
from mprun.report import answer, cells
from mprun.report import published_rows as published

SCHEMA_VERSION = 1
MEMORY = ("peak", *MEMORY_CATEGORIES, "data", "allocator_peak")
FORMULA = ("=", "+", "-", "@")
"""A cell that begins with one is a formula in a spreadsheet, which can start programs."""


def markdown(comparison: Comparison) -> str:
    """The answer, the table, verdicts, notes and skipped folders."""
    rows = [cells.headings(comparison), *cells.rows(comparison)]
    table = [f"| {' | '.join(_flat(cell) for cell in row)} |" for row in rows]
    columns = len(rows[0])
    table.insert(1, f"|{'---|'}{'---:|' * (columns - 2)}{'---|'}")
    lists = {
        "Warnings": [_md(cells.plain(warning)) for warning in comparison.warnings],
        "Advice": [_md(line) for line in answer.advice_lines(comparison)],
        "Verdicts": [
            f"**{_md(f.label)}** {_md(f.sentence)}" for f in answer.variant_sentences(comparison)
        ],
        "Terms": [_md(line) for line in answer.terms(comparison)],
        "Notes": [_md(cells.plain(note)) for note in comparison.notes],
        "Published figures, used in no verdict": [
            _md(f"{row.what}: {row.published} ({row.hardware}; {row.source}); here: {row.here}")
            for row in published.rows(comparison)
        ],
        "Failed runs": [_md(line) for line in answer.failures(comparison)],
        "Skipped folders": [
            f"{_md(cells.plain(str(x.path)))}: {_md(cells.plain(x.reason))}"
            for x in comparison.skipped
        ],
    }
    parts = [
        f"# {_md(cells.plain(comparison.recipe))}: precisions compared",
        *(_md(sentence) for sentence in answer.headline(comparison)),
        "\n".join(table),
        *(
            f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines)
            for title, lines in lists.items()
            if lines
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _flat(cell: tuple[str, str]) -> str:
    """A cell in one line: `12.50 (11.25 to 14.75)`."""
    first, second = cell
    return _md(f"{first} ({second})" if second else first)


def _md(text: str) -> str:
    """Text escaped for Markdown, and for the HTML in it."""
    escaped = re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", text)
    return escaped.replace("&", "&amp;")


def csv_text(comparison: Comparison) -> str:
    """A row for each variant; missing figures are empty."""
    out = io.StringIO()
    rows = [
        {name: _cell(value) for name, value in _record(variant).items()}
        for variant in comparison.variants
    ]
    writer = csv.DictWriter(out, list(rows[0]) if rows else ["label"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """A text as a spreadsheet shows it: one that it would compute begins with a quotation mark."""
    if not isinstance(value, str):
        return value
    text = cells.plain(value)
    return f"'{text}" if text.startswith(FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


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
    """Everything, with the runs' summaries, under the names of `mprun.compare.comparison`.

    Published figures are added as `published`.
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        **_plain(comparison),
        "published": _plain(published.rows(comparison)),
    }
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
