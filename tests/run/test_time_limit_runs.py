"""`train.max_time_s` with a slow model: training leaves time for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.records.run_record import Summary, read_summary
from mprun.train.loop import Limits
from tests.run.clock import Clock
from tests.run.test_resume import assert_equal, trained
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
def slow_model(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Each batch takes 500 ms: a validation or a test takes 10 s."""
    plain = nn.Sequential.forward

    def forward(self: nn.Sequential, x: Tensor) -> Tensor:
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


@pytest.mark.usefixtures("slow_model")
def test_training_leaves_time_for_a_slow_test() -> None:
    summary = limited(30.0, "data.validation_fraction=0")
    assert summary.time_budget_s is not None
    assert summary.time_budget_s.evaluation >= 20 * 0.5


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
