"""Tables that fit a width: what is broken, shortened and left out, and that figures never are."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from mprun.console import print_table, print_text
from mprun.console.fitted_table import (
    CUT,
    HARD_BLANK,
    FittedTable,
    TableCell,
    broken,
    figure_column,
    shortened,
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
    return [line.plain for line in made.lines(width)]


def test_with_room_nothing_changes() -> None:
    for width in (None, 200):
        assert shown(table(), width) == [
            "",
            "a title of some length",
            f"layer  calls  time in ms  {'why':66}  dB",
            "-" * 96,
            f"fc     1,234      56.789  {SENTENCE}  55",
        ]


def test_headings_and_sentences_are_broken_at_blanks_before_anything_is_left_out() -> None:
    lines = shown(table(), 60)
    assert max(map(len, lines)) <= 60
    assert not any("hidden to fit" in line for line in lines)
    assert " ".join(" ".join(lines).split()).count("1,234") == 1
    assert set(SENTENCE.split()) <= set(" ".join(lines).split())


def test_the_least_important_columns_are_left_out_and_named() -> None:
    lines = shown(table("a" * 20), 60)
    assert "calls" not in lines[2]
    assert lines[-1] == "hidden to fit the width: calls; all is in trace.json"
    text = " ".join(shown(table("a" * 20), 40))
    assert "hidden to fit the width: calls, why; all is in trace.json" in text
    assert "56.789" in text
    assert "55" in text


def test_long_names_are_shortened_where_most_stay_apart() -> None:
    names = [f"encoder.layers.{n}.self_attention.output.weight" for n in range(12)]
    lines = shown(table(*names), 50)
    first = [line.split()[0] for line in lines if line.startswith("encoder")]
    assert len({*first}) == len(names)
    assert all(CUT in name for name in first)
    assert "names with ~ are shortened" in " ".join(lines)
    assert max(map(len, lines)) <= 50


def test_a_terminal_too_narrow_for_the_figures_gets_them_whole() -> None:
    made = FittedTable("", figure_column("a"), figure_column("b"))
    made.add_row("123456", "234567")
    console = Console(file=io.StringIO(), width=10, force_terminal=True, color_system=None)
    print_table(console, made)
    assert isinstance(console.file, io.StringIO)
    assert "123456  234567" in console.file.getvalue()


def test_a_hard_blank_is_no_place_to_break() -> None:
    made = FittedTable("", text_column("", narrow=4), text_column("x"))
    made.add_row(f"12{HARD_BLANK}(-50{HARD_BLANK}%) and more", SENTENCE)
    for width in (20, 30, 60):
        assert any("12 (-50 %)" in line for line in shown(made, width))


def test_lines_after_the_first_of_a_cell_are_dim_and_the_rest_has_its_style() -> None:
    made = FittedTable("", text_column("verdict"))
    made.add_row(TableCell("worse\nby far", "red"))
    *_, first, second = made.lines(80)
    assert [str(span.style) for span in first.spans] == ["red"]
    assert [str(span.style) for span in second.spans] == ["dim"]


def test_text_in_brackets_is_no_markup() -> None:
    made = FittedTable("[b]t[/b]", text_column("[red]h"))
    made.add_row("[red]a[/red]")
    assert shown(made, 80)[1:] == ["[b]t[/b]", "[red]h", "-" * 12, "[red]a[/red]"]


def test_sentences_are_broken_on_a_terminal_alone() -> None:
    for is_terminal, count in ((True, 4), (False, 1)):
        console = Console(file=io.StringIO(), width=20, force_terminal=is_terminal)
        print_text(console, SENTENCE)
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert " ".join(lines) == SENTENCE
        assert len(lines) == count


@given(st.text("ab \u65e5", max_size=60), st.integers(1, 20))
def test_broken_lines_hold_every_word(text: str, width: int) -> None:
    lines = broken(text, width)
    assert " ".join(lines) == text
    assert all(cell_len(line) <= width or " " not in line.strip(" ") for line in lines)


@given(st.text("abc.\u65e5", max_size=40), st.integers(4, 30))
def test_a_shortened_name_has_both_ends_and_fits(name: str, width: int) -> None:
    short = shortened(name, width)
    assert cell_len(short) <= max(width, 0)
    if cell_len(name) > width:
        assert CUT in short
        assert cell_len(short) == width


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
    tokens = set(body.partition(f"names with {CUT}")[0].split())
    assert {figure for row in rows for figure in (row[2], row[4])} <= tokens
    if "first" not in note.partition(";")[0]:
        assert {row[1] for row in rows} <= tokens
    changed = tokens - set(" ".join(shown(made, None)).split())
    assert all(CUT in token or not token.strip("-") for token in changed)


def test_a_name_cannot_steer_the_terminal() -> None:
    table = FittedTable("\x1b[2Jtitle", text_column("name"))
    table.caption = "\x07"
    table.add_row("two\nlines \x1b]0;title\x07\u202e")
    text = "\n".join(str(line) for line in table.lines(80))
    assert not {"\x1b", "\x07", "\u202e"} & {*text}
    assert "lines \\x1b]0;title\\x07\\u202e" in text
