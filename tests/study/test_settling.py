"""A study with looks: what it runs, what it writes, and that a kill changes neither."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mprun.cli.main import main
from mprun.config.settings import CompareSettings
from mprun.records.run_folder import read_study_plan
from mprun.study.compare.comparison import Comparison
from mprun.study.settling import compared, settled
from tests.study.crowd import a_crowd, write_recipe

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

SWEEP = [
    *("sweep", "recipe=waiting.py", "precision=fp32,bf16_mixed,bf16_true"),
    *("execution=native", "train.max_steps=20", "train.batch_size=8"),
    *("compare.report=false", "seeds_limit=7", "compare.margin=0.1"),
]


def quick(folder: str, *words: str) -> list[str]:
    """The command of a sweep whose steps do not wait."""
    write_recipe(together=1)
    Path("go").touch()
    return [*SWEEP, f"run.dir={folder}", *words]


def plan_of(folder: str) -> dict[str, Any]:
    """sweep.json."""
    content: dict[str, Any] = json.loads(Path(folder, "sweep.json").read_text(encoding="utf-8"))
    return content


def found_in(folder: str) -> Comparison:
    """The comparison of a study's folder."""
    return compared([Path(folder)], CompareSettings())


def judged(folder: str) -> list[tuple[str, str, str, tuple[Any, ...]]]:
    """Labels, verdicts and looks."""
    rows = found_in(folder).variants
    return [(v.label, v.verdict.word, v.verdict.closed, v.looks) for v in rows]


def runs_in(folder: str) -> list[str]:
    """The names of the folders of runs."""
    paths = Path(folder).glob("*-seed?/summary.json")  # without those that a kill left: abandoned
    return sorted(path.parent.name for path in paths)


def test_a_sweep_without_a_number_of_seeds_ends_when_all_is_settled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(quick("s")) == 0
    text = capsys.readouterr().out
    assert "up to 21 runs" in text
    plan = plan_of("s")["looks"]
    assert plan["seeds"] == [4, 7]
    assert sum(plan["levels"]) == pytest.approx(0.05)
    assert (plan["metric"], plan["split"], plan["margin"]) == ("accuracy", "test", 0.1)
    base, *others = found_in("s").variants
    last = [v.looks[-1].pairs for v in others]
    assert [len(v.runs) for v in others] == last  # settled: no run more
    assert len(base.runs) == max(last)
    for v in others:
        assert v.verdict.closed
        assert f"{v.label}: {v.verdict.word} after {v.looks[-1].pairs} seeds" in text


def test_a_fixed_number_of_seeds_has_no_looks() -> None:
    assert main(quick("s", "seeds=2")) == 0
    assert len(runs_in("s")) == 6
    content = plan_of("s")
    assert content.pop("looks") is None
    Path("s/sweep.json").write_text(json.dumps(content), encoding="utf-8")  # of an earlier version
    assert found_in("s").planned_pairs == ()


def test_the_margin_of_the_plan_judges_later_too() -> None:
    assert main(quick("s")) == 0
    assert found_in("s").margin == 0.1
    stricter = compared([Path("s")], CompareSettings(margin=0.001))
    assert stricter.margin == 0.001
    assert stricter.planned_pairs == (4, 7)
    other = compared([Path("s")], CompareSettings(baseline="bf16_mixed"))
    assert other.planned_pairs == ()  # the looks were planned for fp32


def test_a_foreign_run_and_other_code_close_the_same_variants() -> None:
    assert main(quick("s")) == 0
    plan = read_study_plan(Path("s"))
    before = settled(Path("s"), plan)
    assert before.closed.keys() == {"fp32", "bf16_mixed", "bf16_true"}
    shutil.copytree("s/bf16_true-seed0", "s/mine")
    summary = Path("s/fp32-seed1/summary.json")
    summary.write_text(summary.read_text().replace('"git_commit": ', '"git_commit": "x", "y": '))
    assert settled(Path("s"), plan).closed == before.closed


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("seeds=often", "seeds is a whole number or auto, or null"),
        ("seed_limit=5", "there is no field 'seed_limit'; did you mean 'seeds_limit'"),
        ("seeds=0", "legal is 1 or more"),
        ("seeds_limit=1", "legal is 2 or more and at most 1000"),
    ],
)
def test_what_is_no_number_of_seeds_is_one_line(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "recipe=linear", word]) == 2
    assert message in capsys.readouterr().err


def test_the_baseline_that_fails_ends_the_study(capsys: pytest.CaptureFixture[str]) -> None:
    failing = "recipe=linear", "precision=fp32,bf16_mixed", "train.lr=1e30", "train.max_steps=9"
    assert main(["sweep", *failing, "run.dir=s", "compare.report=false"]) == 1
    assert len(runs_in("s")) == 8  # both fail with all seeds of the first look
    assert "no run was completed" in capsys.readouterr().out


def killed(words: Sequence[str], study: str, at_runs: int, rng: random.Random) -> None:
    """Begin a command, and kill it a moment after so many runs of the study have begun."""
    with a_crowd() as crowd:
        pid = crowd.start(words, "log.txt")
        deadline = time.monotonic() + 60
        while len(list(Path(study).glob("*/metrics.jsonl"))) < at_runs:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        crowd.statuses()


def test_a_study_killed_five_times_has_the_same_plan_verdicts_and_runs() -> None:
    """Inside the first look, at its end, and behind it."""
    assert main(quick("whole")) == 0
    words, rng = quick("parts"), random.Random(0)
    for at_runs in (2, 5, 9, 12, 13):
        killed(words, "parts", at_runs, rng)
        words = ["sweep", "run.resume=parts", "compare.report=false"]
    assert main(words) == 0
    assert plan_of("parts") == plan_of("whole")
    assert judged("parts") == judged("whole")
    assert runs_in("parts") == runs_in("whole")
