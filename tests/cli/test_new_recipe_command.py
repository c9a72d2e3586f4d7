"""`mprun new-recipe`: a recipe that works, and a test of it that can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.records.run_record import read_summary
from tests.cli.processes import Forking

PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
IN_THIS_PROCESS = """
import subprocess
from mprun.cli.main import main

start = subprocess.run

def run(command, **options):
    if command[1:3] != ["-m", "mprun"]:  # git, of the record
        return start(command, **options)
    return subprocess.CompletedProcess(command, main(command[3:]), "", "")

subprocess.run = run
"""
"""The command that the written test starts, without the seconds of another process."""
OPTIONS = ("-q", "-p", "no:cacheprovider", "-k", "bf16")


def test_it_writes_a_recipe_that_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-recipe", "my_points"]) == 0
    output = capsys.readouterr().out
    assert output == (
        "written: my_points.py, test_my_points.py\n"
        "train it: mprun recipe=my_points.py precision=bf16_mixed\n"
        "test it: pytest test_my_points.py\n"
    )
    assert sorted(p.name for p in Path.cwd().iterdir()) == ["my_points.py", "test_my_points.py"]
    assert main(["recipe=my_points.py", "run.dir=r"]) == 0
    summary = read_summary(Path("r"))
    assert summary.metric.name == "accuracy"
    assert summary.test.accuracy is not None
    assert summary.test.accuracy > 0.8
    assert "@" not in Path("my_points.py").read_text(encoding="utf-8")


def test_its_test_passes_and_fails_where_nothing_is_learnt(forking: Forking) -> None:
    assert main(["new-recipe", "my_points.py"]) == 0
    good = forking.run(IN_THIS_PROCESS + PYTEST, *OPTIONS, "test_my_points.py")
    assert good.returncode == 0, good.stdout
    path = Path("my_points.py")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"train.lr": 1e-2', '"train.lr": 1e-9'), encoding="utf-8")
    bad = forking.run(IN_THIS_PROCESS + PYTEST, *OPTIONS, "test_my_points.py")
    assert bad.returncode == 1
    assert "AssertionError" in bad.stdout


@pytest.mark.parametrize("existing", ["mine.py", "test_mine.py"])
def test_nothing_is_overwritten(existing: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(existing).write_text("mine", encoding="utf-8")
    assert main(["new-recipe", "mine"]) == 2
    assert f"{existing} already exists" in capsys.readouterr().err
    assert [p.name for p in Path.cwd().iterdir()] == [existing]
    assert Path(existing).read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        ([], "takes one name, not no name"),
        (["a-b"], "legal is the name of a Python module"),
        (["random"], "would hide; choose another one: my_random"),
        (["a", "--nope"], "mprun new-recipe has no option '--nope'; legal: --help"),
    ],
)
def test_names_that_cannot_be_used(
    args: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-recipe", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mprun: ")
    assert err.count("\n") == 1
    assert fragment in err
    assert not list(Path.cwd().iterdir())
