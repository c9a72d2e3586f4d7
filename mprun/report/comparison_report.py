"""A comparison on the terminal, and as files.

The HTML page and the plots need jinja2 and matplotlib. They are imported when a report is written;
the table needs neither.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mprun.compare.comparison import Comparison
from mprun.console.fitted_table import ALWAYS, FittedTable, TableCell, TableColumn
from mprun.console.formatting import counted
from mprun.errors import UsageError
from mprun.records.files import write_atomic
from mprun.report import answer, cells
from mprun.report import published_rows as published
from mprun.report.cells import plain
from mprun.report.theme import TERMINAL, TONES

NAMED_SKIPPED = 5
"""Up to this many skipped folders are named on the terminal; of more, each reason is counted."""

IMPORTANCE = {
    "runs": 1,
    "samples": 2,
    "step_time": 3,
    "metric": 4,
    "memory": 5,
    "ratio": 6,
    "difference": 7,
}
"""The column with the least is the first that a narrow table leaves out."""

LABEL_WIDTH = 12
"""Labels and verdicts keep this width as long as a column can be left out."""


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


def footer(comparison: Comparison) -> list[str]:
    """Lines below the table, as plain text without rich markup.

    The reasons of verdicts other than `equivalent`, time to equal quality, baseline, margin,
    split, data, hardware, code, notes, published figures, failed runs, skipped folders.
    """
    return [
        *(f"warning: {plain(warning)}" for warning in comparison.warnings),
        *(
            f"{plain(v.label)} {v.verdict.word}: {plain(v.verdict.reason)}"
            for v in comparison.variants[1:]
            if v.verdict.word != "equivalent"
        ),
        *answer.lines(comparison),
        *answer.terms(comparison),
        *(f"note: {plain(note)}" for note in comparison.notes),
        *published.lines(comparison),
        *(f"failed: {line}" for line in answer.failures(comparison)),
        *_skipped(comparison),
    ]


def _skipped(comparison: Comparison) -> list[str]:
    skipped = comparison.skipped
    if len(skipped) <= NAMED_SKIPPED:
        return [f"skipped {plain(str(x.path))}: {plain(x.reason)}" for x in skipped]
    reasons = Counter(plain(x.reason) for x in skipped).most_common()
    lines = [f"skipped {len(skipped)} folders:"]
    lines += [f"  {count} x {reason}" for reason, count in reasons[:NAMED_SKIPPED]]
    if len(reasons) > NAMED_SKIPPED:
        rest = sum(count for _, count in reasons[NAMED_SKIPPED:])
        lines.append(f"  {rest} for {len(reasons) - NAMED_SKIPPED} other reasons")
    return lines


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write report.html, comparison.md, .csv and .json, and the plots as PNGs.

    Each file is replaced as a whole. Plots of an earlier report that this comparison does not have
    are removed, so that they are not mistaken for plots of this report.

    Returns:
        The paths written, report.html first.

    Raises:
        UsageError: the folder cannot be written.
    """
    from mprun.report import exports
    from mprun.report.plots import NAMES, draw

    plots = draw(comparison)
    files = {
        "report.html": exports.page(comparison, plots).encode(errors="replace"),
        "comparison.md": exports.markdown(comparison).encode(errors="replace"),
        "comparison.csv": exports.csv_text(comparison).encode(errors="replace"),
        "comparison.json": exports.json_text(comparison).encode(errors="replace"),
        **{png_name(plot.name): plot.png for plot in plots if plot.png},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomic(folder / name, data)
        for name in NAMES:
            if png_name(name) not in files:
                (folder / png_name(name)).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"compare.dir={folder} cannot be written ({error.strerror}); choose another folder, "
            "or compare.report=false"
        ) from None
    return [folder / name for name in files]


def png_name(plot: str) -> str:
    """The file of a plot."""
    return f"comparison-{plot}.png"
