"""Tables that fit a width: what is broken and left out, and that figures never are."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from mprun.records.console import print_table
from mprun.records.console.fitted_table import (
    FittedTable,
    figure_column,
    text_column,
)

SENTENCE = "the gradient of this layer is lost in float16 without a loss scale"


def table(*names: str) -> FittedTable:
    made = FittedTable(
        "a title of some length",
        text_column("layer"),
        figure_column("calls", 1),
        figure_column("time in ms", 3),
        text_column("why", 2),
        figure_column("dB"),
        elsewhere="trace.json",
    )
    for name in names or ("fc",):
        made.add_row(name, "1,234", "56.789", SENTENCE, "55")
    return made


def shown(made: FittedTable, width: int | None) -> list[str]:
    """The lines on a terminal of this width, or in a file."""
    text = drawn(made, width or 80, is_terminal=width is not None)
    return text.splitlines()


def drawn(made: FittedTable, width: int, is_terminal: bool = True, colours: str = "") -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=is_terminal,
        color_system="standard" if colours else None,
    )
    print_table(console, made)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_least_important_columns_are_left_out_and_named() -> None:
    lines = shown(table("a" * 20), 60)
    assert "calls" not in lines[2]
    assert "hidden to fit the width: calls; all is in trace.json" in " ".join(lines)
    text = " ".join(shown(table("a" * 20), 40))
    assert "hidden to fit the width: calls, why; all is in trace.json" in text
    assert "56.789" in text
    assert "55" in text


def test_text_in_brackets_is_no_markup() -> None:
    made = FittedTable("[b]t[/b]", text_column("[red]h"))
    made.add_row("[red]a[/red]")
    assert shown(made, 80)[1:] == ["[b]t[/b]", "[red]h", "\u2500" * 12, "[red]a[/red]"]


WORD = st.text("abcdef.0123", min_size=1, max_size=30)
FIGURE = st.decimals(-999, 9999, places=2, allow_nan=False).map(str)
ROW = st.tuples(WORD, FIGURE, FIGURE, st.lists(WORD, max_size=6).map(" ".join), FIGURE)


@settings(max_examples=40)
@given(st.lists(ROW, min_size=1, max_size=6), st.integers(50, 160))
def test_any_table_fits_and_its_figures_are_whole(
    rows: list[tuple[str, str, str, str, str]], width: int
) -> None:
    made = FittedTable(
        "t",
        text_column("name"),
        figure_column("first", 1),
        figure_column("second"),
        text_column("why", 2),
        figure_column("third"),
    )
    for row in rows:
        made.add_row(*row)
    lines = shown(made, width)
    assert max(map(cell_len, lines)) <= width
    body, _, note = " ".join(lines).partition("hidden to fit the width: ")
    tokens = set(body.split())
    assert {figure for row in rows for figure in (row[2], row[4])} <= tokens
    if "first" not in note.partition(";")[0]:
        assert {row[1] for row in rows} <= tokens


def test_a_name_cannot_steer_the_terminal() -> None:
    table = FittedTable("\x1b[2Jtitle", text_column("name"))
    table.caption = "\x07"
    table.add_row("two\nlines \x1b]0;title\x07\u202e")
    text = str(table)
    assert not {"\x1b", "\x07", "\u202e"} & {*text}
    assert "lines \\x1b]0;title\\x07\\u202e" in text
