"""A comparison on the screen and in files: the table, in JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from mprun.comparison.rows import Comparison, Estimate, Variant
from mprun.record import jsonable


def comparison_table(comparison: Comparison) -> Table:
    """A row for each variant, the baseline first."""
    title = f"{comparison.recipe}, {comparison.split} {comparison.metric}, {comparison.data}"
    table = Table(title=title, title_justify="left")
    for column in ("variant", "seeds", "ms", "ratio", "MiB", comparison.metric, "diff", "verdict"):
        table.add_column(column)
    for variant in comparison.variants:
        table.add_row(*_row(variant))
    return table


def _row(variant: Variant) -> list[str]:
    peak, step = variant.memory_bytes.get("peak"), variant.step_time_ms
    return [
        variant.label,
        str(len(variant.runs)),
        "-" if step is None else f"{step.median:.2f}",
        _estimate(variant.step_time_ratio),
        "-" if peak is None else f"{peak / 2**20:.1f}",
        _estimate(variant.metric),
        _estimate(variant.difference),
        str(variant.verdict),
    ]


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return "-"
    around = found.interval
    return f"{found.value:.4f}" + (f" [{around.low:.4f}, {around.high:.4f}]" if around else "")


def footer(comparison: Comparison) -> list[str]:
    """Verdicts' reasons, notes, and what was skipped."""
    reasons = [f"{v.label}: {v.verdict}: {v.verdict.reason}" for v in comparison.variants[1:]]
    skipped = [f"skipped: {s.path}: {s.reason}" for s in comparison.skipped]
    return [*reasons, *(f"note: {text}" for text in comparison.notes), *skipped]


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write comparison.json; the files written."""
    rows = [
        {"label": v.label, "verdict": v.verdict.word, "reason": v.verdict.reason}
        for v in comparison.variants
    ]
    path = folder / "comparison.json"
    path.write_text(json.dumps(jsonable({"variants": rows}), indent=1), encoding="utf-8")
    return [path]
