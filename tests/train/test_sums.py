"""What a recipe is judged by: `correct` counts samples, and the metric is a known one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.records.run_record import read_summary

CLASS = '''
from dataclasses import dataclass

import torch

from mprun.data import Splits, TensorSet
from mprun.recipe import Recipe


@dataclass(frozen=True)
class Tokens(Recipe):
    """Copies of sequences of 5 tokens: each sample has 5 targets."""

    kind: str = "samples"
    {metric}

    def model(self):
        return torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Linear(8, 7))

    def data(self, request):
        x = torch.arange(60).view(12, 5) % 7
        part = TensorSet(x, x)
        return Splits("tokens", "generated", part, part.first(8), part.first(4))

    def loss(self, output, batch):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    def correct(self, output, batch):
        right = output.argmax(-1) == batch[1]
        return {{
            "samples": lambda: right.all(1).sum(),
            "tokens": lambda: right.sum() + 5,
            "negative": lambda: -right.sum() - 1,
            "mean": lambda: right.float().mean(),
            "float count": lambda: right.all(1).float().sum(),
            "vector": lambda: right.all(1),
            "number": lambda: int(right.all(1).sum()),
            "none": lambda: None,
        }}[self.kind]()
'''
YAML = """# @package _global_
recipe: {name: tokens, target: own_tokens.Tokens}
train: {epochs: 2, batch_size: 4, eval_batch_size: 4, lr: 0.05, optimizer: {name: sgd}}
"""


def own_recipe(monkeypatch: pytest.MonkeyPatch, metric: str = "") -> list[str]:
    """The words of a run of a user's recipe."""
    Path("configs/recipe").mkdir(parents=True)
    Path("configs/recipe/tokens.yaml").write_text(YAML, encoding="utf-8")
    text = CLASS.format(metric=metric)
    Path("own_tokens.py").write_text(text, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "own_tokens", raising=False)
    return ["--config-dir", "configs", "recipe=tokens", "run.dir=run"]


def test_a_count_of_samples_is_an_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(own_recipe(monkeypatch)) == 0
    summary = read_summary(Path("run"))
    for epoch in summary.history:
        for scores in (epoch.train, epoch.validation):
            accuracy = scores.accuracy
            assert accuracy is not None
            assert 0 <= accuracy <= 1
    assert summary.test.accuracy in (0, 0.25, 0.5, 0.75, 1)


@pytest.mark.representative("tokens-", "mean-*", "number-*")
@pytest.mark.parametrize(
    ("kind", "received"),
    [
        ("tokens", ""),  # how many depends on the model; 5 more than right, so above 4 at once
        ("negative", "-"),
        ("mean", "(float32)"),
        ("float count", "(float32)"),
        ("vector", "a tensor of shape [4] (bool)"),
        ("number", "(int)"),
    ],
)
def test_what_is_no_count_of_samples_is_refused_by_name(
    kind: str,
    received: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*own_recipe(monkeypatch), f"recipe.model.kind='{kind}'"]
    assert main(words) == 1
    note, line = capsys.readouterr().err.splitlines()
    assert note.startswith("note: recipe.target=")
    assert "accuracy: the recipe's correct returned " in line
    assert received in line
    assert "for a batch of 4 samples; it must return the number" in line
    assert "an integer scalar from 0 to 4" in line
    summary = read_summary(Path("run"))
    assert summary.status == "failed"
    assert summary.error is not None
    assert "correct" in summary.error
    assert not Path("run/traceback.txt").exists()


def test_a_recipe_judged_by_loss_may_return_none(monkeypatch: pytest.MonkeyPatch) -> None:
    words = own_recipe(monkeypatch, 'METRIC = ("loss", "min")')
    assert main([*words, "recipe.model.kind=none"]) == 0
    assert read_summary(Path("run")).test.accuracy is None
