"""The learning rate of each step against closed formulas and PyTorch's schedulers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, SequentialLR, StepLR

from mprun.cli.main import main
from mprun.config.compose import compose
from mprun.records.run_record import read_lines
from mprun.train.assemble import build_parts, make_plan
from mprun.train.loop import Schedule

pytestmark = pytest.mark.usefixtures("quick_runs")

LINEAR = ["recipe=linear", "recipe.model.in_features=4", "recipe.model.out_features=2"]
LINEAR += ["recipe.model.samples=4", "train.batch_size=4", "train.epochs=null", "device=cpu"]
LINEAR += ["train.lr=0.5", "speed=plain"]


def rates(folder: Path, *words: str) -> list[float]:
    """The learning rate of each step of a run, from its record."""
    assert main([*LINEAR, *words, f"run.dir={folder}"]) == 0
    return [line["lr"] for line in read_lines(folder) if line["kind"] == "step"]


def by_hand(kind: str, steps: int, warmup: int, lowest: float, lr: float = 0.5) -> list[float]:
    rates = [lr * n / warmup for n in range(1, warmup + 1)]
    rest = steps - warmup
    for n in range(rest):
        falls = {
            "none": 1.0,
            "linear": 1 - n / rest,
            "cosine": 0.5 + 0.5 * math.cos(math.pi * n / rest),
        }
        rates.append(lowest + (lr - lowest) * falls[kind])
    return rates


@pytest.mark.parametrize("kind", ["none", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "lowest"), [(0, 0.0), (3, 0.0), (3, 0.1), (0, 0.1), (8, 0.1)])
def test_each_step_has_the_rate_of_the_formula(kind: str, warmup: int, lowest: float) -> None:
    words = [f"train.scheduler={kind}", f"train.warmup_steps={warmup}", f"train.min_lr={lowest}"]
    parts = build_parts(make_plan(compose([*LINEAR, *words, "train.max_steps=8"]).config, ()))
    found = move(parts.scheduler, parts.optimizer, 8)
    wanted = by_hand(kind, 8, warmup, 0.5 if kind == "none" else lowest)
    assert found == pytest.approx(wanted, rel=1e-9)


def test_it_resumes_exactly(tmp_path: Path) -> None:
    words = ["train.scheduler=cosine", "train.warmup_steps=4", "train.min_lr=0.01"]
    words += ["train.optimizer.name=adamw", "train.max_steps=9"]
    whole = rates(tmp_path / "a", *words)
    stopped = [*LINEAR, *words, f"run.dir={tmp_path / 'b'}", "train.checkpoint_every_steps=3"]
    plan = make_plan(compose(stopped).config, ())
    for at in (3, 6):  # in the warm-up, and after it
        first, second = build_parts(plan), build_parts(plan)
        move(first.scheduler, first.optimizer, at)
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.scheduler.load_state_dict(first.scheduler.state_dict())
        rest = move(second.scheduler, second.optimizer, 9 - at)
        assert rest == whole[at:]


def move(schedule: Schedule, optimizer: Any, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step(None)
    return seen


def test_a_skipped_step_does_not_warm_up(tmp_path: Path) -> None:
    words = ["precision=fp16_mixed", "loss_scale.value=1e30", "train.max_steps=120"]
    found = rates(tmp_path / "run", *words, "train.warmup_steps=10")
    skipped = [x["skipped"] for x in read_lines(tmp_path / "run") if x["kind"] == "step"]
    assert any(skipped)
    assert not all(skipped)
    taken = 0
    for lr, skip in zip(found, skipped, strict=True):
        assert lr == pytest.approx(0.5 * min(1.0, (taken + 1) / 10))
        taken += not skip


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train.warmup_steps=9"], "train.warmup_steps=9: the run has 8 optimizer steps"),
        (["train.min_lr=1"], "train.min_lr=1.0: legal is at most train.lr=0.5"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], text: str, capsys: Any) -> None:
    assert main([*LINEAR, "train.max_steps=8", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["sequential", "chained"])
def test_schedules_of_schedules_resume(kind: str) -> None:
    def made() -> tuple[Any, Schedule]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        parts = [ConstantLR(optimizer, 0.5, 2), StepLR(optimizer, 3, 0.5)]
        if kind == "chained":
            return optimizer, Schedule(ChainedScheduler(parts, optimizer))
        return optimizer, Schedule(SequentialLR(optimizer, parts, milestones=[2]))

    whole = move(*reversed(made()), steps=8)  # type: ignore[misc]
    optimizer, schedule = made()
    move(schedule, optimizer, 3)
    other, resumed = made()
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert move(resumed, other, 5) == whole[3:]
