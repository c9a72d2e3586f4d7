"""A comparison shown: on the terminal, and as files.

The HTML page and the plots need jinja2 and matplotlib, which are imported when a report is written:
a table costs neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from mprun.compare.rows import Comparison
from mprun.errors import UsageError
from mprun.records.files import write_atomic
from mprun.report import answer, cells
from mprun.report import published_rows as published
from mprun.report.cells import plain

STYLES = {"better": "green", "equivalent": "green", "worse": "red", "inconclusive": "yellow"}
LABEL_WIDTHS = (16, 10, 6)
"""How narrow labels become: before intervals stand in two lines, in three, before words break."""

GAP = "  "
"""What rich puts between columns; some versions put a space behind the last as well."""

NAMED_SKIPPED = 5
"""Up to this many skipped folders are named on the terminal; of more, each reason is counted."""


class Needs(NamedTuple):
    """Widths of a column: of its longest line, of lines broken behind "to", of its longest word."""

    line: int
    half: int
    word: int


class FigureTable(Table):
    """A table that breaks lines between figures, never inside of one while there is any way.

    rich takes from all columns alike where a window is narrow, which breaks the lines of each. Here
    a column that must give gives all it can before the next one does.
    """

    needs: tuple[Needs, ...] = ()
    """One for each column; the first has labels, the last has words."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - len(GAP) * (len(self.needs) - 1) - 1
        for column, width in zip(self.columns, _fitted(self.needs, room), strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)


def _fitted(needs: Sequence[Needs], room: int) -> list[int]:
    """Widths of columns that together fill at most `room`, where that is possible at all."""
    widths = [column.line for column in needs]
    wide, middle, narrow = (min(widths[0], width) for width in LABEL_WIDTHS)
    lines, halves, words = ([getattr(c, kind) for c in needs[1:]] for kind in Needs._fields)
    for floor in (
        [wide, *lines[:-1], words[-1]],
        [wide, *halves],
        [middle, *halves],
        [middle, *words],
        [narrow, *words],
        [narrow, *(1 + word // 2 for word in words)],
        [1] * len(widths),
    ):
        spare = [width - least for width, least in zip(widths, floor, strict=True)]
        for place in sorted(range(len(spare)), key=spare.__getitem__, reverse=True):
            widths[place] -= max(0, min(spare[place], sum(widths) - room))
    return widths


def comparison_table(comparison: Comparison) -> Table:
    """A row for each variant; figures with their interval, or ratio, on a second line."""
    table = FigureTable(
        title=Text(f"{plain(comparison.recipe)}: {cells.variants(comparison)}"),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    rows, headings = cells.rows(comparison), cells.headings(comparison)
    columns = list(zip(headings, *rows, strict=True))
    table.needs = tuple(map(_needs, columns))
    for place, column in enumerate(columns):
        is_text = place in (0, len(columns) - 1)
        table.add_column(_cell(column[0]), justify="left" if is_text else "right", overflow="fold")
    for row, variant in zip(rows, comparison.variants, strict=True):
        *figures, verdict = map(_cell, row)
        verdict.stylize(STYLES.get(variant.verdict.word, ""), 0, len(variant.verdict.word))
        table.add_row(*figures, verdict)
    return table


def _needs(column: Iterable[Sequence[str]]) -> Needs:
    lines = [line for cell in column for line in ([cell] if isinstance(cell, str) else cell)]
    words = [word for line in lines for word in line.split()]
    halves = [half for line in lines for half in line.replace(" to ", " to\n").splitlines()]
    word = max(map(cell_len, words), default=1)
    intervals = [cell_len(half) for half in halves if half.endswith(" to")]
    return Needs(max(map(cell_len, lines)), max([word, *intervals]), word)


def _cell(figure: Sequence[str]) -> Text:
    """A text, or two in two lines; as Text, so that square brackets are no markup."""
    if isinstance(figure, str):
        return Text(figure)
    first, second = figure
    return Text(first).append(f"\n{second}", style="dim") if second else Text(first)


def footer(comparison: Comparison) -> list[str]:
    """What the table does not say, in lines of plain text (no rich markup).

    Why verdicts other than `equivalent` were given, baseline, margin, split, data, hardware, code,
    notes, published figures, failed runs, skipped folders.
    """
    return [
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

    Each file is replaced whole. A plot that this comparison has nothing for, left by an earlier
    report in the folder, is removed: it would be taken for this one's.

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
