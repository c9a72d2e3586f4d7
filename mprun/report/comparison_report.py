"""A comparison on the terminal, and as files.

The HTML page and the plots need jinja2 and matplotlib. They are imported when a report is written;
the table needs neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from mprun.compare.comparison import Comparison
from mprun.compare.formatting import counted
from mprun.errors import UsageError
from mprun.records.files import write_atomic
from mprun.report import answer, cells
from mprun.report import published_rows as published
from mprun.report.cells import plain
from mprun.report.theme import TERMINAL, TONES

NAMED_SKIPPED = 5
"""Up to this many skipped folders are named on the terminal; of more, each reason is counted."""


class ColumnWidths(NamedTuple):
    """Widths that a column can have."""

    lines: int
    """No line is broken."""
    halves: int
    """Intervals are broken behind "to"."""
    blanks: int
    """Lines are broken at every blank."""


LEVELS = (("halves", 16), ("blanks", 10))
"""How columns of figures are broken while the labels have less than this width."""


class FigureTable(Table):
    """A table that breaks lines between figures, and inside one only if there is no room.

    In a narrow window rich shrinks all columns alike, which breaks figures. Here the columns of
    figures are broken one after another, the one that gains most first, and only at certain places.
    The labels and the verdicts share the rest.
    """

    column_widths: tuple[ColumnWidths, ...] = ()
    """One for each column; labels are in the first, verdicts in the last."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        labels, *figures, verdicts = self.column_widths
        gaps = 2 * len(figures) + 3  # some versions of rich add one at the end
        room = options.max_width - gaps - verdicts.blanks
        widths = [column.lines for column in figures]
        for level, least in LEVELS:
            broken: list[int] = [getattr(column, level) for column in figures]
            for i in sorted(range(len(widths)), key=lambda i: broken[i] - widths[i]):
                if room - sum(widths) < min(least, labels.lines):
                    widths[i] = broken[i]
        spare = room - sum(widths)
        label = max(1, min(labels.lines, spare))
        verdict = min(verdicts.lines, verdicts.blanks + max(0, spare - label))
        for column, width in zip(self.columns, (label, *widths, verdict), strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)


def comparison_table(comparison: Comparison) -> Table:
    """A row for each variant; figures with their interval, or ratio, on a second line."""
    count = counted(len(comparison.variants), "variant")
    table = FigureTable(
        title=Text(f"{plain(comparison.recipe)}: {count}"),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    rows, headings = cells.rows(comparison), cells.headings(comparison)
    columns = list(zip(headings, *rows, strict=True))
    table.column_widths = tuple(map(_column_widths, columns))
    for place, column in enumerate(columns):
        is_text = place in (0, len(columns) - 1)
        table.add_column(_cell(column[0]), justify="left" if is_text else "right", overflow="fold")
    for row, variant in zip(rows, comparison.variants, strict=True):
        *figures, verdict = map(_cell, row)
        tone = TONES.get(variant.verdict.word, "")
        verdict.stylize(TERMINAL.get(tone, ""), 0, len(variant.verdict.word))
        table.add_row(*figures, verdict)
    return table


def _column_widths(column: Iterable[tuple[str, str]]) -> ColumnWidths:
    lines = [line for cell in column for line in cell]
    longest = max((cell_len(word) for line in lines for word in line.split()), default=1)
    halves = [cell_len(f"{line.partition(' to ')[0]} to") for line in lines if " to " in line]
    return ColumnWidths(max(map(cell_len, lines)), max([longest, *halves]), longest)


def _cell(figure: tuple[str, str]) -> Text:
    """One or two lines, as Text: square brackets are not markup."""
    first, second = figure
    return Text(first).append(f"\n{second}", style="dim") if second else Text(first)


def footer(comparison: Comparison) -> list[str]:
    """Lines below the table, as plain text without rich markup.

    The reasons of verdicts other than `equivalent`, baseline, margin, split, data, hardware, code,
    notes, published figures, failed runs, skipped folders.
    """
    return [
        *(f"warning: {plain(warning)}" for warning in comparison.warnings),
        *(
            f"{plain(v.label)} {v.verdict.word}: {plain(v.verdict.reason)}"
            for v in comparison.variants[1:]
            if v.verdict.word != "equivalent"
        ),
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
    from mprun.report.html import page
    from mprun.report.plots import NAMES, draw

    plots = draw(comparison)
    files = {
        "report.html": page(comparison, plots).encode(errors="replace"),
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
