"""What commands that look at a recipe's step have in common: mistakes, folders, runs to resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from mprun.cli.main import main
from tests.cli.small import LINEAR, made

pytestmark = pytest.mark.usefixtures("native_is_fast")

COMMANDS = ("trace", "memory", "numerics", "check", "search-ops")


@pytest.mark.parametrize(
    ("command", "words", "fragments"),
    [
        ("trace", ["trace.op=true"], ["did you mean 'trace.ops'?"]),
        ("memory", ["memory.against=fp33"], ["memory.against: ", "did you mean 'fp32'?"]),
        ("memory", ["memory.fits=much"], ["'memory.fits=much'", "16GiB"]),
        ("memory", ["train.batch_size=range(1,4)", "seed=interval(0,1)"], ["an interval has"]),
        ("memory", ["precision=half_sr_full", "execution=native"], ["execution=native: "]),
        ("check", ["check.targets=[t5]"], ["check.targets=t5", "of t4, v100"]),
        ("check", ["check.junit=no/junit.xml"], ["check.junit=no/junit.xml: expected a file"]),
        ("numerics", ["numerics.stepz=3"], ["no field 'numerics.stepz'", "'numerics.steps'?"]),
        ("numerics", ["train.max_steps=3"], ["numerics.warmup=3 leaves none of 3 steps to insp"]),
        ("search-ops", ["precision=fp32"], ["casts no op", "precision=bf16_mixed, precision=fp16"]),
        ("search-ops", ["compare.margin=1"], ["no field 'compare.margin'"]),
        ("doctor", ["doctor.budget_s=0"], ["doctor.budget_s=0: legal is above 0 and at most 600"]),
    ],
    ids=str,
)
def test_a_mistake_ends_with_status_2_and_nothing_made(
    command: str, words: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *LINEAR, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mprun: ")
    assert err.count("\n") == 1
    assert [text for text in fragments if text not in err] == [], err
    assert made() == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_holds_something_is_left_as_it_is(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine", encoding="utf-8")
    assert main([command, *LINEAR, "run.dir=run"]) == 2
    assert "mprun: run.dir=run already contains notes.txt" in capsys.readouterr().err
    assert made() == ["run", "run/notes.txt"]
    assert Path("run/notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_run_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINEAR, "train.max_steps=2", "run.dir=run"]) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    for command in COMMANDS:
        capsys.readouterr()
        assert main([command, "run.resume=run"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.startswith("mprun: ")) == ("", True)
        assert "run.resume" in err or "a resumed run keeps its configuration" in err
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
    assert [path.name for path in Path().iterdir()] == ["run"]
