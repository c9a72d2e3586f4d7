"""`mprun compare BEFORE AFTER compare.json=-`: what it prints, ends with, leaves, and refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import mprun
from mprun.cli.main import main
from mprun.errors import UsageError
from tests.study.compare.folders import write_run

BEFORE = (0.950, 0.960, 0.955)
SAME, BETTER, OPEN = (0.9501, 0.9601, 0.9552), (0.970, 0.981, 0.976), (0.93, 0.99, 0.95)


def write_side(folder: str, accuracies: Sequence[float] = BEFORE, **changes: Any) -> None:
    for seed, accuracy in enumerate(accuracies):
        write_run(Path(folder, f"{seed}"), "fp32", seed, accuracy=accuracy, **changes)


def line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one line on standard output."""
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(
    ("accuracies", "words", "status", "verdict"),
    [
        (SAME, [], 0, "equivalent"),
        (SAME, ["compare.keep=better"], 3, "equivalent"),
        (SAME, ["compare.stream=s.jsonl"], 3, "equivalent"),
        (SAME, ["compare.stream=s.jsonl", "compare.keep=unharmed"], 0, "equivalent"),
        (BETTER, ["compare.stream=s.jsonl"], 0, "better"),
        ([x - 0.1 for x in SAME], [], 3, "worse"),
        (OPEN, [], 4, "inconclusive"),
    ],
    ids=str,
)
def test_the_code_before_and_after_a_change_is_decided_on(
    accuracies: Sequence[float],
    words: list[str],
    status: int,
    verdict: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_side("before", git_commit="1")
    write_side("after", accuracies, git_commit="2")
    assert main(["compare", "before", "after", "compare.json=-", *words]) == status
    found = line(capsys)
    assert (found["baseline"], found["variant"]) == ("fp32 (before)", "fp32 (after)")
    assert (found["verdict"], found["seeds"]) == (verdict, 3)
    assert {0: True, 3: False, 4: None}[status] is found["keep"]
    difference = sum(accuracies) / 3 - sum(BEFORE) / 3
    assert found["difference"] == pytest.approx(difference)
    assert found["interval"][0] < difference < found["interval"][1]
    assert (found["step_time_interval"], found["memory_ratio"]) == (None, 1)
    names = {path.name for path in Path().iterdir()} - {".s.jsonl.lock"}
    assert names == {"before", "after", *(["s.jsonl"] if "stream" in str(words) else [])}


def test_a_change_whose_runs_fail_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    write_side("before")
    write_side("after", status="failed", error="no memory")
    words = ["compare", "before", "after", "compare.json=-", "compare.stream=s.jsonl"]
    assert main(words) == 3
    found = line(capsys)
    assert found["verdict"] == "worse"
    assert "no memory" in found["reason"]
    assert not Path("s.jsonl").exists()


def test_a_file_gets_the_line_beside_table_and_report(capsys: pytest.CaptureFixture[str]) -> None:
    write_side("before")
    write_side("after", OPEN)
    words = ["compare", "after", "before", "compare.json=new/decision.json"]
    words += ["compare.baseline='fp32 (before)'"]
    assert main(words) == 4
    assert "inconclusive" in capsys.readouterr().out
    found = json.loads(Path("new/decision.json").read_text(encoding="utf-8"))
    assert found["baseline"] == "fp32 (before)"
    report = json.loads(Path("comparison/comparison.json").read_text(encoding="utf-8"))
    assert [v["label"] for v in report["variants"]] == ["fp32 (before)", "fp32 (after)"]
    assert report["variants"][1]["verdict"]["more_seeds"] == found["seeds_to_go"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["before", "before", "compare.json=-"],
            "these runs are of 1: fp32 (before); name the folders",
        ),
        (["before", "after", "compare.stream=s.jsonl"], "add compare.json=-"),
        (["before", "after", "compare.keep=better"], "add compare.json=-"),
        (
            ["before", "after", "compare.json=-", "compare.fail_if=worse"],
            "leave compare.fail_if out",
        ),
        (["before", "after", "compare.json=-", "compare.keep=all"], "auto, unharmed, better"),
        (["before", "after", "compare.json=''"], "legal is the name of a file, or -"),
        (["before", "after", "compare.json=-", "compare.stream=before"], "name another"),
    ],
    ids=str,
)
def test_mistakes_end_with_status_2_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_side("before")
    write_side("after", SAME)
    assert main(["compare", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_only_compare_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "recipe=linear", "compare.json=-"]) == 2
    assert "a setting of mprun compare alone; leave it out" in capsys.readouterr().err
    write_side("before")
    with pytest.raises(UsageError, match="command mprun compare"):
        mprun.compare("before", json="-")
