"""`train.max_time_s` with a slow evaluation: it ends in time, and partial scores are labelled."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.records.run_record import Summary, TimeBudget, read_lines, read_summary
from mprun.study.compare.load import find_runs
from mprun.study.compare.verdicts import compare
from mprun.train.checks import PARTIAL, over_time_warning
from mprun.train.loop import Limits
from tests.run.clock import Clock
from tests.run.test_resume import assert_equal, trained
from tests.summaries import example
from tests.train.trainers import trainer

MNIST = [
    *("recipe=mnist", "data.source=generated", "data.train_limit=6000", "data.eval_limit=640"),
    *("train.batch_size=32", "train.eval_batch_size=32", "train.epochs=null"),
    "recipe.model.units=32",
]
"""20 batches of validation, and 20 of test."""
SLACK = 1.1
"""A limited run may take this many times as long."""


@pytest.fixture
def slow_evaluation(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Each batch takes 500 ms in evaluation: a validation or a test takes 10 s."""
    plain = nn.Sequential.forward

    def forward(self: nn.Sequential, x: Tensor) -> Tensor:
        if not self.training:
            clock.sleep(0.5)
        return plain(self, x)

    monkeypatch.setattr(nn.Sequential, "forward", forward)


def limited(limit_s: float, *words: str) -> Summary:
    """A run with this limit, which it keeps."""
    assert main([*MNIST, *words, f"train.max_time_s={limit_s}", "run.dir=run"]) == 0
    summary = read_summary(Path("run"))
    assert summary.status == "completed"
    assert summary.steps > 0
    times = summary.time_budget_s
    assert times is not None
    assert summary.wall_time_s <= max(limit_s, times.start_up + limit_s / 2) * SLACK
    return summary


def partial(summary: Summary) -> list[str]:
    """The warnings of partial scores."""
    return [text for text in summary.warnings if text.startswith(PARTIAL)]


@pytest.mark.usefixtures("slow_evaluation")
def test_training_leaves_time_for_a_slow_test() -> None:
    summary = limited(30.0, "data.validation_fraction=0")
    assert summary.test.samples is None
    assert not partial(summary)
    assert summary.time_budget_s is not None
    assert summary.time_budget_s.evaluation >= 20 * 0.5


@pytest.mark.usefixtures("slow_evaluation")
def test_what_does_not_fit_is_left_out_and_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    summary = limited(10.0)
    validation, test = summary.history[-1].validation, summary.test
    assert validation.samples is not None
    assert test.samples is not None
    assert 0 < test.samples < 640
    assert test.samples % 32 == 0
    assert test.loss is not None
    assert test.accuracy is not None
    assert partial(summary) == [
        f"{PARTIAL}validation of epoch 1 used the first {validation.samples:,} of 640, the test "
        f"used the first {test.samples:,} of 640; these scores are partial"
    ]
    out = capsys.readouterr().out
    assert f"warning: {partial(summary)[0]}" in " ".join(out.split())
    assert f"(PARTIAL: the first {test.samples} samples)" in out
    line = next(x for x in read_lines(Path("run")) if x["kind"] == "validation")
    assert line["samples"] == validation.samples
    runs, _ = find_runs([Path("run")])
    notes = compare(runs, margin=0.005, relative_margin=0.02).notes
    assert [x for x in notes if "PARTIAL test metric" in x]

    assert main(["run.resume=run"]) == 0  # it takes no step, and evaluates everything
    again = read_summary(Path("run"))
    assert again.steps == summary.steps
    assert again.test.samples is None
    assert not partial(again)


def test_a_run_longer_than_its_limit_says_so() -> None:
    summary = example()
    summary.wall_time_s = 10.0
    none = dict.fromkeys((field.name for field in fields(TimeBudget)), 0.0)
    summary.time_budget_s = replace(TimeBudget(**none), start_up=7.5, evaluation=0.5)
    text = "the run took 10.0 s, longer than train.max_time_s=8: start-up 7.5 s, evaluation 0.5 s"
    assert over_time_warning(summary, 8.0) == text
    assert over_time_warning(summary, 10.0) is None
    assert over_time_warning(summary, None) is None


def test_the_limit_changes_no_bit_of_training() -> None:
    words = [*MNIST, "data.validation_fraction=0.1", "train.max_steps=20"]
    assert main([*words, "run.dir=free"]) == 0
    assert main([*words, "train.max_time_s=1000", "run.dir=limited"]) == 0
    assert_equal(trained(Path("free")), trained(Path("limited")))
    assert read_summary(Path("free")).test == read_summary(Path("limited")).test


@pytest.mark.usefixtures("clock")
def test_a_limited_trainer_that_is_resumed_spends_only_what_is_left() -> None:
    def spent(limit_s: float, state: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        training, _ = trainer(limits=Limits(None, None, limit_s))
        if state is not None:
            training.load_state_dict(state)
        training.fit()
        return training.step, training.state_dict()

    steps, state = spent(2)
    assert steps > 0
    assert 2 <= state["trained_s"] < 4
    assert spent(2, state)[0] == steps
    more, later = spent(4, state)
    assert more > steps
    assert 4 <= later["trained_s"] < 6
    assert not torch.equal(later["model"]["weight"], state["model"]["weight"])
