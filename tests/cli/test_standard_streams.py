"""Standard output that is full, closed, left by its reader, or in another encoding."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.cli.standard_streams import PatientStream
from mprun.records.run_record import read_summary
from tests.study.compare.folders import write_run

pytestmark = pytest.mark.usefixtures("quick_runs")

LINEAR = ["recipe=linear", "train.max_steps=2", "run.dir=run"]
FULL = (
    "mprun: standard output cannot be written (No space left on device); what mprun prints is "
    "incomplete\n"
)


@pytest.mark.parametrize("command", ["--help", "--version", "train", "compare"])
def test_a_full_output_is_the_cause_that_is_named(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(Path("runs/a"))
    words = {"train": LINEAR, "compare": ["compare", "runs", "compare.report=false"]}
    with Path("/dev/full").open("w") as full, contextlib.redirect_stdout(full):
        assert main(words.get(command, [command])) == 1
    assert capsys.readouterr().err == FULL
    if command == "train":
        assert read_summary(Path("run")).status == "completed"


def test_a_status_that_is_not_0_stays(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as full, contextlib.redirect_stdout(full):
        assert main(["--help", "nothing"]) == 1
        assert main(["train.lr=-1"]) == 2
    assert "train.lr=-1.0: legal is above 0" in capsys.readouterr().err


def test_a_completed_run_without_an_output_has_status_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with contextlib.redirect_stdout(None):
        assert main(LINEAR) == 0
    assert capsys.readouterr().err == ""


def test_a_full_standard_error_leaves_the_status() -> None:
    with Path("/dev/full").open("w") as full, contextlib.redirect_stderr(full):
        assert main(["train.lr=-1"]) == 2
        assert main(["--version"]) == 0
    with contextlib.redirect_stderr(None):
        assert main(["train.lr=-1"]) == 2


def test_a_character_that_the_encoding_lacks_becomes_an_escape() -> None:
    raw = io.BytesIO()
    stream = PatientStream(io.TextIOWrapper(raw, encoding="ascii"))
    print("größer \udcff", file=stream)  # type: ignore[call-overload]
    stream.flush()
    assert raw.getvalue() == b"gr\\xf6\\xdfer \\udcff\n"
    assert stream.error is None
