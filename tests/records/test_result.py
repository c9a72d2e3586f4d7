"""A result is shown and written in one way, also where the measurement fails on its way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import pytest

import mprun
from mprun.errors import RunFailedError
from mprun.records.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.result import Result, measuring, show


def table() -> FittedTable:
    made = FittedTable("sizes", text_column("name"), figure_column("bytes"))
    made.add_row("weights", "12")
    return made


def test_parts_files_and_warnings_come_in_this_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result(
        {"x": float("nan")},
        ["the answer", table()],
        {"a.json": "{}", "b.bin": b"\x00"},
        ["late"],
        status=3,
    )
    assert show(result, tmp_path) == 3
    out, err = capsys.readouterr()
    places = [out.index(text) for text in ("the answer", "sizes", "weights", "written:")]
    assert places == sorted(places)
    assert out.endswith(f"written: {tmp_path}/a.json, b.bin\n")
    assert err == "late\n"
    assert (tmp_path / "b.bin").read_bytes() == b"\x00"
    assert json.loads(result.json) == {"x": "nan"}


def test_a_file_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"a\.json cannot be written"):
        show(Result(None, [], {"a.json": "{}"}), tmp_path / "missing" / "folder")


def fail() -> None:
    try:
        raise ValueError("planted")
    except ValueError as error:
        raise RunFailedError("the step fails") from error


def test_the_traceback_of_the_users_code_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="the traceback is in") as caught, measuring(tmp_path):
        fail()
    assert str(caught.value) == f"the step fails (the traceback is in {tmp_path}/traceback.txt)"
    assert "ValueError: planted" in (tmp_path / "traceback.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", [None, Path("/dev/null/nowhere")])
def test_a_folder_that_cannot_be_written_hides_no_failure(folder: Path | None) -> None:
    with pytest.raises(RunFailedError, match="the step fails"), measuring(folder):
        raise RunFailedError("the step fails") from ValueError("planted")


def test_records_and_tables_of_questions_import_neither_torch_nor_matplotlib() -> None:
    folder = Path(mprun.__file__).parent
    questions = [
        path
        for path in [*folder.glob("inspect/*.py"), folder / "inspect/check/__init__.py"]
        if re.search("^QUESTION = ", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    paths = [*questions, *folder.rglob("*_result.py")]
    names = [".".join(("mprun", *x.relative_to(folder).with_suffix("").parts)) for x in paths]
    names = [name.removesuffix(".__init__") for name in names]
    assert len(names) >= 9
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib"} & {*done.stdout.split()}


def hostile() -> Result:
    made = FittedTable(
        "sizes of <b>",
        text_column("name"),
        figure_column("bytes\nshare"),
        caption="all & every",
    )
    made.add_row("=cmd|a<i>", "12\n50 %")
    made.add_section()
    made.add_row("rest, all", "-")
    return Result({"x": 1}, ["the *answer*\nin two lines", made, "", table()])


def test_a_result_as_markdown_has_every_part_and_no_markup_of_its_texts() -> None:
    assert hostile().markdown == (
        "the \\*answer\\*  \nin two lines\n\n"
        "**sizes of \\<b\\>**\n\n"
        "| name | bytes (share) |\n|---|---:|\n"
        "| =cmd\\|a\\<i\\> | 12 (50 %) |\n| rest, all | - |\n\n"
        "all &amp; every\n\n"
        "**sizes**\n\n| name | bytes |\n|---|---:|\n| weights | 12 |\n"
    )


def test_the_first_table_as_csv_is_no_formula_and_has_empty_cells_without_a_figure() -> None:
    assert hostile().csv == 'name,bytes (share)\n\'=cmd|a<i>,12 (50 %)\n"rest, all",\n'
    assert hostile().tables[1].csv == "name,bytes\nweights,12\n"
    assert Result(None, ["no table"]).csv == ""


def test_a_notebook_shows_sentences_and_tables_escaped() -> None:
    html = hostile()._repr_html_()
    assert "<p>the *answer*<br>in two lines</p>" in html
    assert "<caption>sizes of &lt;b&gt;</caption>" in html
    assert '<td style="text-align:right">12<br>50 %</td>' in html
    assert "=cmd|a&lt;i&gt;" in html
    assert "<p>all &amp; every</p>" in html
    assert html.count("<tr>") == 2 + 2 + 1


def test_a_notebook_shows_pictures_as_images_with_escaped_captions() -> None:
    files = {"memory.svg": "<svg/>", "memory.png": b"", "memory.json": "{}"}
    html = Result(None, [], files, draw=lambda: {"Loss: <b>": "<svg></svg>"})._repr_html_()
    sources = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert [b64decode(text) for text in sources] == [b"<svg/>", b"<svg></svg>"]
    assert "<figcaption>Loss: &lt;b&gt;</figcaption>" in html
