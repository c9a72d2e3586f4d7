"""Tables that fit the width of a terminal.

A table that is wrapped like prose has broken figures, and columns that the eye cannot follow. So a
narrow terminal gets, one after the other:

1. headings and sentences broken at blanks
2. names shortened in their middle: names of layers differ at both ends
3. fewer columns: the least important are left out, and a line below names them

A file and a pipe have no width: they get everything, and nothing is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from mprun.console.table_text import (
    csv_text,
    html_table,
    markdown_table,
    one_line,
)
from mprun.errors import printable

ALWAYS = 100
"""The importance of a column that is never left out."""
BETWEEN = "  "
"""Between two columns."""
CUT = "~"
"""In place of the middle of a name."""
NARROW, NARROWEST = 24, 12
"""The width that text keeps while columns can still be left out, and the one it keeps then."""
HARD_BLANK = "\u00a0"
"""Shown as a blank; no line is broken at it."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a `FittedTable`."""

    heading: str
    importance: int = ALWAYS
    """The column with the least is left out first."""
    is_text: bool = True
    """Text is broken at blanks, and its long words are shortened; figures stay as they are."""
    is_right: bool = False
    narrow: int = NARROW
    """The width that text keeps while columns can still be left out."""
    cell: Callable[[Any], str] = str
    """Makes the cell of one of the table's `rows`."""


def text_column(
    heading: str,
    importance: int = ALWAYS,
    narrow: int = NARROW,
    cell: Callable[[Any], str] = str,
) -> TableColumn:
    """A column of names or sentences."""
    return TableColumn(heading, importance, narrow=narrow, cell=cell)


def figure_column(
    heading: str, importance: int = ALWAYS, cell: Callable[[Any], str] = str
) -> TableColumn:
    """A column of figures: at the right, never broken."""
    return TableColumn(heading, importance, is_text=False, is_right=True, cell=cell)


class TableCell(NamedTuple):
    """A cell with a style. Lines after the first are secondary and dim."""

    text: str
    style: str = ""


def without_controls(text: str) -> str:
    """`text`, its lines and hard blanks kept, without anything else that steers a terminal."""
    lines = (line.split(HARD_BLANK) for line in text.split("\n"))
    return "\n".join(HARD_BLANK.join(map(printable, parts)) for parts in lines)


class _TableRow(NamedTuple):
    cells: tuple[TableCell, ...]
    style: str


class _ColumnSizes(NamedTuple):
    """The widths that a column can have, from large to small."""

    whole: int
    """Nothing is broken."""
    folded: int
    """The heading is broken."""
    narrow: int
    narrowest: int


class FittedTable:
    """Rows of text and figures that fit the width of a terminal.

    Args:
        title: a line above.
        columns: from left to right.
        rows: objects that the columns make a row of cells of; `add_row` takes cells.
        elsewhere: where all columns and whole names are.
        caption: a line below.
    """

    def __init__(
        self,
        title: str,
        *columns: TableColumn,
        rows: Iterable[object] = (),
        elsewhere: str = "the output into a pipe",
        caption: str = "",
    ) -> None:
        self.columns, self.caption = columns, without_controls(caption)
        self.title, self._elsewhere = without_controls(title), elsewhere
        self._rows: list[_TableRow] = []
        for row in rows:
            self.add_row(*(column.cell(row) for column in columns))

    def add_row(self, *cells: str | TableCell, style: str = "") -> None:
        """Add a row; a cell for each column."""
        made = [TableCell(cell) if isinstance(cell, str) else cell for cell in cells]
        safe = tuple(TableCell(without_controls(cell.text), cell.style) for cell in made)
        self._rows.append(_TableRow(safe, style))

    def add_section(self) -> None:
        """Add an empty line."""
        self.add_row(*[""] * len(self.columns))

    @property
    def csv(self) -> str:
        """The headings and the rows as CSV; a cell of `-`, which has no figure, is empty."""
        return csv_text(["" if x == "-" else one_line(x) for x in row] for row in self._texts())

    @property
    def markdown(self) -> str:
        """The headings and the rows as a table of Markdown."""
        return markdown_table(self._texts(), [x.is_right for x in self.columns])

    @property
    def html(self) -> str:
        """Title, headings and rows as a table of HTML."""
        return html_table(self._texts(), [x.is_right for x in self.columns], self.title)

    def __str__(self) -> str:
        return "\n".join(line.plain for line in self.lines(None))

    def _texts(self) -> list[list[str]]:
        """The cells of the headings and of each row that is not empty."""
        rows = [[cell.text for cell in row.cells] for row in self._rows]
        shown = [[x.heading for x in self.columns], *(row for row in rows if any(row))]
        return [[cell.replace(HARD_BLANK, " ") for cell in row] for row in shown]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width if console.is_terminal else None
        yield from self.lines(width, "-" if options.ascii_only else "\u2500")

    def lines(self, width: int | None, rule: str = "-") -> Iterator[Text]:
        """The lines for a terminal of this width; None for no terminal."""
        places, widths = self._fit(width)
        if self.title:
            yield Text()
            yield from (Text(line, "bold") for line in broken(self.title, width))
        headings = [TableCell(self.columns[place].heading) for place in places]
        yield from self._row_lines(places, widths, headings, "bold", at_bottom=True)
        yield Text(rule * (sum(widths) + len(BETWEEN) * (len(widths) - 1)))
        heads = [self._head(place, room) for place, room in zip(places, widths, strict=True)]
        for row in self._rows:
            cells = [
                self._shortened(row.cells[place], room, head)
                for place, room, head in zip(places, widths, heads, strict=True)
            ]
            yield from self._row_lines(places, widths, cells, row.style)
        note = self._note(places, any(head is not None for head in heads))
        for text in filter(None, (self.caption, note)):
            yield from (Text(line, "dim") for line in broken(text, width))

    def _row_lines(
        self,
        places: Sequence[int],
        widths: Sequence[int],
        cells: Sequence[TableCell],
        style: str,
        at_bottom: bool = False,
    ) -> Iterator[Text]:
        """The lines of a row: as many as its highest cell has."""
        columns = []
        for cell, width in zip(cells, widths, strict=True):
            first, *others = cell.text.split("\n")
            lines = [(line, cell.style) for line in broken(first, width)]
            columns.append(lines + [(x, "dim") for other in others for x in broken(other, width)])
        height = max(map(len, columns))
        for n in range(height):
            text = Text(style=style)
            for place, width, lines in zip(places, widths, columns, strict=True):
                at = n - (height - len(lines) if at_bottom else 0)
                line, line_style = lines[at] if 0 <= at < len(lines) else ("", "")
                gap = " " * (width - cell_len(line))
                if place != places[0]:
                    text.append(BETWEEN)
                if self.columns[place].is_right:
                    text.append(gap)
                text.append(line.replace(HARD_BLANK, " "), line_style)
                if not self.columns[place].is_right:
                    text.append(gap)
            text.rstrip()
            yield text

    def _fit(self, width: int | None) -> tuple[list[int], list[int]]:
        """The columns that are shown, and their widths."""
        sizes = [self._sizes(place) for place in range(len(self.columns))]
        places = list(range(len(sizes)))
        if width is None:
            return places, [size.whole for size in sizes]
        while True:
            room = width - len(BETWEEN) * (len(places) - 1)
            optional = [p for p in places if self.columns[p].importance < ALWAYS]
            fits = sum(sizes[place].narrow for place in places) <= room
            if fits or not optional:
                break
            places.remove(min(optional, key=lambda place: self.columns[place].importance))
        widths = [sizes[place].whole for place in places]
        widths = _reduced(widths, [sizes[place].folded for place in places], room)
        least = [sizes[p].narrow if fits else sizes[p].narrowest for p in places]
        return places, _reduced(widths, least, room)

    def _sizes(self, place: int) -> _ColumnSizes:
        column, texts = self.columns[place], [row.cells[place].text for row in self._rows]
        body = max((cell_len(line) for text in texts for line in text.split("\n")), default=0)
        heading = max(map(cell_len, column.heading.split("\n")))
        word = max(map(cell_len, _words(column.heading)))
        whole, folded = max(heading, body), max(word, body)
        if not column.is_text:
            return _ColumnSizes(whole, folded, folded, folded)
        words = [x for text in texts for x in _words(text)]
        least = max([word, *(cell_len(x) for x in words if HARD_BLANK in x)])
        longest = max(map(cell_len, words), default=0)
        narrow = max(least, min(body, column.narrow))
        return _ColumnSizes(whole, folded, narrow, max(least, min(longest, narrow, NARROWEST)))

    def _head(self, place: int, width: int) -> int | None:
        """How much of a name's beginning stays in a column: what keeps most names apart.

        None if no name is too long.
        """
        words = {x for row in self._rows for x in _words(row.cells[place].text)}
        long = [x for x in words if _is_long(x, width)] if self.columns[place].is_text else []
        room = width - len(CUT)
        heads = sorted(range(1, room), key=lambda head: abs(2 * head - room))
        if not long or not heads:
            return None
        return max(heads, key=lambda head: len({shortened(x, width, head) for x in long}))

    def _shortened(self, cell: TableCell, width: int, head: int | None) -> TableCell:
        if head is None:
            return cell
        lines = [
            " ".join(
                shortened(x, width, head) if _is_long(x, width) else x for x in line.split(" ")
            )
            for line in cell.text.split("\n")
        ]
        return cell._replace(text="\n".join(lines))

    def _note(self, places: Sequence[int], has_short_names: bool) -> str:
        """What a narrow terminal does not show."""
        headings = [c.heading.split("\n")[0] for c in self.columns]
        hidden = ", ".join(name for n, name in enumerate(headings) if n not in places)
        missing = [f"hidden to fit the width: {hidden}"] if hidden else []
        if has_short_names:
            missing.append(f"names with {CUT} are shortened")
        return f"{'; '.join(missing)}; all is in {self._elsewhere}" if missing else ""


def _words(text: str) -> list[str]:
    return text.replace("\n", " ").split(" ")


def _is_long(word: str, width: int) -> bool:
    return HARD_BLANK not in word and cell_len(word) > width


def _reduced(widths: list[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that sum to `room` if they can: the widest are reduced, none below its least."""
    for _ in range(sum(widths) - room):
        wide = [n for n, width in enumerate(widths) if width > least[n]]
        if not wide:
            break
        widths[max(wide, key=lambda n: widths[n])] -= 1
    return widths


def broken(text: str, width: int | None) -> list[str]:
    """The lines of a text, broken at blanks; a word longer than `width` has a line of its own."""
    if width is None or cell_len(text) <= width:
        return [text]
    lines: list[str] = []
    for word in text.split(" "):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def shortened(name: str, width: int, head: int | None = None) -> str:
    """A name in at most `width` columns: its middle is cut out, `head` columns of it stay before.

    By default half of the columns stay before the cut and half behind it.
    """
    room = width - len(CUT)
    if cell_len(name) <= width or room < 2:
        return name
    before = room // 2 if head is None else head
    tail = set_cell_size(name[::-1], room - before)[::-1]
    return f"{set_cell_size(name, before)}{CUT}{tail}"
