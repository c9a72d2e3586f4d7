"""What a budget lets begin, and what a study says that it left open. Time is simulated."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.records.run_record import read_summary
from mprun.study.budget import Budget, TrialBudget
from mprun.study.trials import Outcome, Trial, Trials

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_part_begins_only_if_it_ends_in_time() -> None:
    clock = Clock()
    budget = Budget("sweep.budget_min", 2, clock)  # 110 s: ten are left for the report
    assert budget.text == "sweep.budget_min=2"
    assert budget.has_room(110)
    assert not budget.has_room(111)
    clock.now_s = 109
    assert budget.has_room(1)
    assert not budget.is_over()
    clock.now_s = 110
    assert not budget.has_room(0)
    assert budget.is_over()
    short = Budget("sweep.budget_min", 0.1, Clock())  # 6 s: a tenth of them for the report
    assert short.has_room(5.4)
    assert not short.has_room(5.5)
    assert Budget().has_room(1e9)


def test_a_trial_is_expected_to_take_as_long_as_the_longest_of_its_variant() -> None:
    clock = Clock()
    trials = TrialBudget(Budget("sweep.budget_min", 2, clock))
    assert trials.admits("fast")
    trials.took("fast", 5)
    assert trials.admits("slow")
    trials.took("slow", 40)
    trials.took("slow", 30)
    clock.now_s = 80
    assert not trials.admits("slow")
    assert not trials.admits("unknown")  # as long as the longest of any
    assert trials.admits("fast")
    assert not trials.admits("fast", partner="slow")  # the pair has no room


# ---- studies -------------------------------------------------------------------------------------

OVERRIDES = ["recipe=linear", "train.max_steps=3", "precision=fp32,bf16_mixed", "run.dir=s"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock on which each trial takes a minute."""
    clock, carry_out = Clock(), Trials.run

    def run(self: Trials, trial: Trial) -> Outcome:
        outcome = carry_out(self, trial)
        clock.now_s += 60
        return outcome

    monkeypatch.setattr(Trials, "run", run)
    budget = functools.partial(Budget, clock=clock)
    monkeypatch.setattr("mprun.cli.study_commands.Budget", budget)
    return clock


def compared() -> dict[str, object]:
    read: dict[str, object] = json.loads(Path("s/comparison.json").read_text(encoding="utf-8"))
    return read


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("limit", ["sweep.budget_min=4", "study.max_time_s=240"])
def test_a_sweep_ends_in_its_budget_says_what_is_missing_and_is_continued(
    limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *OVERRIDES, "seeds=3", limit]) == 0
    note = (
        f"{limit} left out 3 of 6 trials: bf16_mixed seeds 1, 2, fp32 seed 2; "
        "continue with: mprun sweep run.resume=s"
    )
    assert f"note: {note}" in capsys.readouterr().out
    done = {path.parent.name for path in Path("s").glob("*/summary.json")}
    assert done == {"fp32-seed0", "bf16_mixed-seed0", "fp32-seed1"}
    record = compared()
    assert record["not_run"] == {"bf16_mixed": [1, 2], "fp32": [2]}
    assert note in record["notes"]
    assert main(["sweep", "run.resume=s"]) == 0
    assert compared()["not_run"] == {}
    assert "left out" not in capsys.readouterr().out
    assert len([*Path("s").glob("*/summary.json")]) == 6


def test_a_trial_under_way_at_the_end_is_interrupted_and_continued(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    carry_out = Trials.run

    def jump(self: Trials, trial: Trial) -> Outcome:
        if trial.variant != "fp32":
            clock.now_s = 1e6  # it takes longer than was expected
        return carry_out(self, trial)

    with monkeypatch.context() as patch:
        patch.setattr(Trials, "run", jump)
        assert main(["sweep", *OVERRIDES, "seeds=1", "sweep.budget_min=60"]) == 0
    summary = read_summary(Path("s/bf16_mixed-seed0"))
    assert (summary.status, summary.steps < 3) == ("interrupted", True)
    assert str(summary.error).startswith("sweep.budget_min=60 at step")
    assert compared()["not_run"] == {"bf16_mixed": [0]}
    assert "left out 1 of 2 trials: bf16_mixed seed 0" in capsys.readouterr().out
    assert main(["sweep", "run.resume=s"]) == 0
    assert read_summary(Path("s/bf16_mixed-seed0")).status == "completed"


@pytest.mark.usefixtures("clock")
def test_advice_in_a_budget_names_the_modes_it_knows_nothing_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["advise", *OVERRIDES, "seeds=3", "advise.budget_min=1.2"]) == 0
    output = capsys.readouterr().out
    assert "take fp32" in output
    assert "not tried (advise.budget_min=1.2 ended before its first trial" in output
    assert "note: advise.budget_min=1.2 left out 5 of 6 trials" in output
    advice = compared()["advice"]
    assert "bf16_mixed" in advice["not_tried"]
    assert any("left out 5 of 6" in note for note in advice["notes"])


def test_a_budget_without_a_completed_run_is_a_failure_that_says_how_to_continue(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(self: Trials, trial: Trial) -> bool:
        clock.now_s = 1e6
        return False

    monkeypatch.setattr(Trials, "has_ended", late)
    assert main(["sweep", *OVERRIDES, "seeds=1", "sweep.budget_min=1"]) == 1
    text = capsys.readouterr().out
    assert "no run was completed; sweep.budget_min=1 left out 2 of 2 trials" in text
    assert "continue with: mprun sweep run.resume=s" in text
