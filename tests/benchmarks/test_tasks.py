"""What the ways to train of `make bench` train: each recipe of a tutorial, in each precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.peers import PEERS, peers_of
from benchmarks.tasks import CASES, DATA, Task, save_data
from mprun.train.data import DataRequest, image_splits

SETS = {"fashion_mnist": "FashionMNIST", "mnist": "MNIST"}


class EnoughError(Exception):
    """Two steps were taken."""


def turns() -> Callable[[], None]:
    left = [2]

    def step() -> None:
        left[0] -= 1
        if not left[0]:
            raise EnoughError

    return step


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA, str(tmp_path))
    for recipe, name in SETS.items():
        save_data(recipe, image_splits(name, DataRequest(source="generated")), tmp_path)


@pytest.mark.representative("fashion_mnist-fp32", "mnist-bf16_mixed", "linear-bf16_mixed")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("recipe", CASES)
def test_raw_loops_and_the_tutorials_way_train_each_recipe(recipe: str, precision: str) -> None:
    task = Task.parse(f"{recipe} {64 if recipe == 'linear' else 4} {precision}")
    for name in peers_of(recipe):
        if name.startswith(("raw", "tutorial")) and "compiled" not in name:
            with pytest.raises(EnoughError):
                PEERS[name].train(task, turns())  # type: ignore[arg-type]


def test_mprun_gives_others_a_turn_after_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    PEERS["mprun speed=plain"].train(Task.parse("mnist 4 fp32"), turns())  # type: ignore[arg-type]
    assert "the run failed: EnoughError" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", CASES)
def test_the_loss_is_the_recipes_in_float32(recipe: str) -> None:
    task = Task(recipe, 64, "bf16_mixed")
    x, y = next(task())
    model, _ = task.built()
    with task.autocast():
        output = model(x)
    loss = task.loss(output, y)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, task.case.recipe.loss(output.float(), (x, y)))
