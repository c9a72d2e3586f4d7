"""A result is shown and written in one way, also where the measurement fails on its way."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from mprun import results
from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.errors import RunFailedError
from mprun.results import PartialResultError, Result, measuring, show


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


def test_without_a_folder_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(Result(None, ["done"], {"a.json": "{}"})) == 0
    assert capsys.readouterr().out == "done\n"


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


def test_what_was_measured_before_a_failure_is_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Result(None, ["two ops"], {"trace.json": "[1, 2]"})
    with pytest.raises(RunFailedError, match=r"^the step cannot run$"), measuring(tmp_path):
        raise PartialResultError("the step cannot run", before)
    assert capsys.readouterr().out.startswith("two ops\n")
    assert (tmp_path / "trace.json").read_text(encoding="utf-8") == "[1, 2]"


@pytest.mark.parametrize("folder", [None, Path("/dev/null/nowhere")])
def test_a_folder_that_cannot_be_written_hides_no_failure(folder: Path | None) -> None:
    with pytest.raises(RunFailedError, match="the step fails"), measuring(folder):
        raise RunFailedError("the step fails") from ValueError("planted")


def test_no_module_of_results_imports_torch_or_matplotlib() -> None:
    names = [module.name for module in pkgutil.iter_modules(results.__path__, "mprun.results.")]
    assert len(names) >= 8
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib"} & {*done.stdout.split()}
