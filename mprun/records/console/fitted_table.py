"""Tables that fit the width of a terminal, which rich draws; and as Markdown, CSV and HTML.

A table that is wrapped like prose has broken figures, and columns that the eye cannot follow. So a
narrow terminal gets, one after the other:

1. headings and sentences broken at blanks; a longer name goes on in the next line
2. fewer columns: the least important are left out, and a line below names them

A file and a pipe have no width: they get everything, and nothing is broken.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD, Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from mprun.errors import printable

ALWAYS = 100  # The importance of a column that is never left out
BETWEEN = 2  # Blanks between two columns
# The width that text keeps while columns can still be left out, unless its column says less, and
# the one it keeps then
NARROW, NARROWEST = 24, 8
Cell = Callable[[Any], str]  # Makes the cell of one of the table's `rows`


@dataclass(frozen=True)
class TableColumn:
    """A column of a `FittedTable`."""

    heading: str
    importance: int = ALWAYS  # The column with the least is left out first
    is_text: bool = True  # Text is broken where the table is too wide; figures stay as they are
    is_right: bool = False
    cell: Cell = str
    narrow: int = NARROW  # The width that text keeps while columns can still be left out


def text_column(
    heading: str, importance: int = ALWAYS, cell: Cell = str, narrow: int = NARROW
) -> TableColumn:
    """A column of names or sentences."""
    return TableColumn(heading, importance, cell=cell, narrow=narrow)


def figure_column(heading: str, importance: int = ALWAYS, cell: Cell = str) -> TableColumn:
    """A column of figures: at the right, never broken."""
    return TableColumn(heading, importance, is_text=False, is_right=True, cell=cell)


class TableCell(NamedTuple):
    """A cell with a style. Lines after the first are secondary and dim."""

    text: str
    style: str = ""

    @property
    def styled(self) -> Text:
        """The cell as rich draws it."""
        first, *others = self.text.split("\n")
        below = [(f"\n{line}", "dim") for line in others]
        return Text.assemble((first, self.style), *below)


def without_controls(text: str) -> str:
    """`text` with its line ends, and without anything else that steers a terminal."""
    return "\n".join(map(printable, text.split("\n")))


class _TableRow(NamedTuple):
    cells: tuple[TableCell, ...]
    style: str


class FittedTable:
    """Rows of text and figures that fit the width of a terminal.

    The columns make a row of cells of each object in `rows`; `add_row` takes cells. The title is a
    line above, the caption one below; `elsewhere` is where all columns and whole names are.
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
        """The headings and the rows as a table of Markdown, without a line end."""
        lines = [
            f"| {' | '.join(markdown_text(one_line(x)) for x in row)} |" for row in self._texts()
        ]
        sides = ["---:" if column.is_right else "---" for column in self.columns]
        lines.insert(1, f"|{'|'.join(sides)}|")
        return "\n".join(lines)

    @property
    def html(self) -> str:
        """Title, headings and rows as a table of HTML, escaped, without style sheet or script."""
        sides = ["right" if column.is_right else "left" for column in self.columns]
        body = ""
        for number, row in enumerate(self._texts()):
            tag = "td" if number else "th"
            texts = [escape(cell).replace("\n", "<br>") for cell in row]
            cells = zip(sides, texts, strict=True)
            line = "".join(f'<{tag} style="text-align:{x}">{y}</{tag}>' for x, y in cells)
            body += f"<tr>{line}</tr>\n"
        return f"<table>\n<caption>{escape(self.title)}</caption>\n{body}</table>"

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, force_terminal=False).print(self, soft_wrap=True)
        return file.getvalue().removesuffix("\n")

    def _texts(self) -> list[list[str]]:
        """The cells of the headings and of each row that is not empty."""
        rows = [[cell.text for cell in row.cells] for row in self._rows]
        return [[x.heading for x in self.columns], *(row for row in rows if any(row))]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width if console.is_terminal else None
        places = self._places_in(width)
        if self.title:
            yield Text()
            yield from (Text(line, "bold") for line in broken(self.title, width))
        # Rich would cut figures where the width is too small for them.
        whole = _total(self._width(place, None) for place in places)
        least = _total(self._width(place, NARROWEST) for place in places)
        room = whole if width is None else max(width, least)
        table = self._table(places, room, "-" if options.ascii_only else "\u2500")
        for line in console.render_lines(table, options.update_width(room), pad=False):
            shown = Text.assemble(*((part.text, part.style or "") for part in line))
            shown.rstrip()  # rich fills cells with blanks, which a file would keep
            yield shown
        for text in filter(None, (self.caption, self._note(places))):
            yield from (Text(line, "dim") for line in broken(text, width))

    def _table(self, places: Sequence[int], room: int, rule: str) -> Table:
        """Rich's table of these columns, of width `room`, to which rich breaks text."""
        # "ascii": rich would take a box with a frame where the encoding lacks the rule
        box = Box(str(SIMPLE_HEAD).replace("\u2500", rule), ascii=True)
        # The box is one blank between two columns, the padding is the others.
        table = Table(box=box, show_edge=False, pad_edge=False, padding=(0, BETWEEN - 1, 0, 0))
        widths = self._widths(places, room)
        for place in places:
            column = self.columns[place]
            table.add_column(
                Text(column.heading),  # a text, whose brackets are no markup
                justify="right" if column.is_right else "left",
                overflow="fold",
                width=None if column.is_text else widths[place],
            )
        for row in self._rows:
            table.add_row(*(row.cells[place].styled for place in places), style=row.style)
        return table

    def _places_in(self, width: int | None) -> list[int]:
        """Which columns are shown in this width."""
        places = list(range(len(self.columns)))
        for place in sorted(places, key=lambda place: self.columns[place].importance):
            kept = _total(self._width(x, self.columns[x].narrow) for x in places)
            if width is None or kept <= width or self.columns[place].importance == ALWAYS:
                break
            places.remove(place)
        return places

    def _widths(self, places: Sequence[int], room: int) -> dict[int, int]:
        """The widths, before text is broken: the longest headings of figures are, as needed."""
        widths = {place: self._width(place, None) for place in places}
        for place in sorted(places, key=lambda place: -widths[place]):
            if _total(widths.values()) > room and not self.columns[place].is_text:
                widths[place] = self._width(place, 0)
        return widths

    def _width(self, place: int, most: int | None) -> int:
        """How wide a column is with text of at most `most`; with None nothing is broken."""
        column, texts = self.columns[place], [row.cells[place].text for row in self._rows]
        body = max((cell_len(line) for text in texts for line in text.split("\n")), default=0)
        if most is None:
            return max(body, *map(cell_len, column.heading.split("\n")))
        word = max(map(cell_len, column.heading.replace("\n", " ").split(" ")))
        return max(word, min(body, most) if column.is_text else body)

    def _note(self, places: Sequence[int]) -> str:
        """What a narrow terminal does not show."""
        headings = [column.heading.split("\n")[0] for column in self.columns]
        hidden = ", ".join(name for n, name in enumerate(headings) if n not in places)
        return f"hidden to fit the width: {hidden}; all is in {self._elsewhere}" if hidden else ""


def _total(widths: Iterable[int]) -> int:
    """The width of a table with columns of these widths."""
    return sum(width + BETWEEN for width in widths) - BETWEEN


def broken(text: str, width: int | None) -> list[str]:
    """The lines of a text, broken at blanks; a word longer than `width` has a line of its own."""
    # not by rich, which would break such a word: a path could not be copied
    if width is None or cell_len(text) <= width:
        return [text]
    lines: list[str] = []
    for word in text.split(" "):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


# ---- cells as Markdown and CSV -------------------------------------------------------------------

# A cell that begins with one is a formula in a spreadsheet, which can start programs
FORMULA = ("=", "+", "-", "@")
NUMBER = re.compile(r"[-+](\d+\.?\d*(e[-+]?\d+)?|inf|nan)", re.IGNORECASE)


def markdown_text(text: str) -> str:
    """Text escaped for Markdown, and for the HTML in it."""
    escaped = re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", text)
    return escaped.replace("&", "&amp;")


def one_line(cell: str) -> str:
    """A cell in one line: `12.50 (11.25 to 14.75)`."""
    first, *others = cell.split("\n")
    return f"{first} ({' '.join(others)})" if others else first


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """CSV; texts that a spreadsheet would compute begin with a quotation mark."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([*map(_shown, row)] for row in rows)
    return out.getvalue()


def _shown(cell: object) -> object:
    is_formula = isinstance(cell, str) and cell.startswith(FORMULA) and not NUMBER.fullmatch(cell)
    return f"'{cell}" if is_formula else cell
