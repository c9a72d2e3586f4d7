"""The wall time of a run is the sum of its categories, and each second is where it belongs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.recipes.mnist import Mnist
from mprun.records.run_record import Summary, read_summary
from mprun.train import checkpoint
from mprun.train.assemble import Plan
from mprun.train.loggers import TensorBoardLogger
from mprun.train.loop import Trainer
from mprun.train.sums import MetricReadback
from tests.run.clock import Clock
from tests.run.conftest import AtStep
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("quick_runs")

SMALL = ["data.source=generated", "data.train_limit=256", "data.eval_limit=64"]
VALIDATED = [*SMALL, "data.validation_fraction=0.25", "train.batch_size=32"]
RECIPES = {
    "linear": ["recipe=linear", "train.epochs=20"],
    "mnist": ["recipe=mnist", *VALIDATED],
    "fashion_mnist": ["recipe=fashion_mnist", *VALIDATED, "recipe.model.image_size=28"],
}
MAX_END_READINGS = 40
"""Of the clock, for the last summary, the table and the end of the command."""


PAUSE_S = 1000.0
"""Longer by this clock than everything else of a run."""


def agreed() -> Summary:
    """The summary of `run`, whose times sum to the wall time."""
    summary = read_summary(Path("run"))
    conforms(summary, Summary)
    assert summary.time_budget_s is not None
    times = asdict(summary.time_budget_s)
    assert min(times.values()) >= 0
    assert sum(times.values()) == pytest.approx(summary.wall_time_s, rel=1e-9)
    return summary


def carry_out(clock: Clock, status: int, *words: str, before_s: float = 0.0) -> Summary:
    """Run in folder `run`; its record's wall time is that of the command outside."""
    began_s = clock.now_s
    assert main([*words]) == status
    outside_s = before_s + clock.now_s - began_s
    summary = agreed()
    assert 0 <= outside_s - summary.wall_time_s <= MAX_END_READINGS * clock.tick_s
    return summary


@pytest.mark.representative("linear", "mnist")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_times_sum_to_the_wall_time(
    recipe: str, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RECIPES[recipe], "train.max_steps=9", "train.checkpoint_every_steps=4"]
    summary = carry_out(clock, 0, *words, "logger=tensorboard", "run.dir=run")
    times = summary.time_budget_s
    assert times is not None
    used = {name for name, value in asdict(times).items() if value > 0}
    assert used >= {"compute", "data", "metrics", "logging", "checkpoints", "start_up"}
    assert times.evaluation > 1e-4 or recipe == "linear"
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(f"time: {summary.wall_time_s:.{1 if summary.wall_time_s >= 10 else 2}f}")
    assert "start-up" in last


def test_a_resumed_run_sums_over_both_processes(clock: Clock) -> None:
    words = [*RECIPES["mnist"], "run.dir=run"]
    first = carry_out(clock, 0, *words, "train.max_steps=6")
    saved = torch.load(checkpoint.path_in(Path("run")), weights_only=True)["journal"]
    assert 0 < saved["elapsed_s"] <= first.wall_time_s
    assert sum(saved["time_budget_s"].values()) == pytest.approx(saved["elapsed_s"])
    before = saved["time_budget_s"]
    again = ["run.resume=run", "train.max_steps=12"]
    second = carry_out(clock, 0, *again, before_s=saved["elapsed_s"])
    assert second.time_budget_s is not None
    assert all(value >= before[k] for k, value in asdict(second.time_budget_s).items())
    assert second.time_budget_s.compute > before["compute"]


@pytest.mark.parametrize("status", [1, 130])
def test_a_run_that_ends_early_sums_too(at_step: AtStep, clock: Clock, status: int) -> None:
    def fault() -> None:
        if status == 1:
            clock.sleep(PAUSE_S)
            raise ZeroDivisionError("planted")
        signal.raise_signal(signal.SIGINT)

    at_step(5, fault)
    summary = carry_out(clock, status, *RECIPES["mnist"], "run.dir=run")
    assert summary.status == ("failed" if status == 1 else "interrupted")
    assert summary.time_budget_s is not None
    assert summary.time_budget_s.compute >= (PAUSE_S if status == 1 else 0)


def slow(clock: Clock, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        clock.sleep(PAUSE_S)
        return plain(*args, **named)

    return call


SLOW = {
    "start_up": (Plan, "backend_flags"),
    "compute": (Trainer, "optimizer_step"),
    "metrics": (MetricReadback, "put"),
    "data": (Mnist, "prepare"),
    "logging": (TensorBoardLogger, "on_steps"),
    "checkpoints": (checkpoint, "serialized"),
    "evaluation": (nn.Sequential, "forward"),
}


@pytest.mark.parametrize("category", SLOW)
def test_slow_code_shows_in_its_category(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, category: str
) -> None:
    words = [*RECIPES["mnist"], "train.max_steps=8", "logger=tensorboard"]
    # takes a step of its own
    monkeypatch.setattr("mprun.train.run.footprint", lambda *_: ({}, None))
    place, name = SLOW[category]
    plain = getattr(place, name)
    if category == "evaluation":

        def forward(self: nn.Sequential, x: Tensor) -> Tensor:
            if not self.training:
                clock.sleep(PAUSE_S)
            result: Tensor = plain(self, x)
            return result

        monkeypatch.setattr(place, name, forward)
    else:
        monkeypatch.setattr(place, name, slow(clock, plain))
    times = carry_out(clock, 0, *words, "run.dir=run").time_budget_s
    assert times is not None
    least = {"compute": 8, "metrics": 8, "data": 8, "evaluation": 2}.get(category, 1)
    assert getattr(times, category) >= least * PAUSE_S
    others = {name: value for name, value in asdict(times).items() if name != category}
    if category in ("data", "metrics"):  # an evaluation prepares batches and reads losses too
        assert others.pop("evaluation") >= 2 * PAUSE_S
    assert sum(others.values()) < PAUSE_S
