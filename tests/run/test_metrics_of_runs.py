"""Losses of named parts and metrics in a run's record, on the terminal and in a comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.cli.main import main
from mprun.records.run_record import Summary, read_lines, read_summary
from tests.run.test_resume import assert_same_run
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

CLASS = '''
from dataclasses import dataclass

import torch
from torch.nn import functional

from mprun.data import Splits, TensorSet
from mprun.metrics import Perplexity
from mprun.recipe import Recipe


class Count:
    """Tokens per batch, as a user would count them."""

    def __init__(self):
        self.tokens = self.batches = 0

    def update(self, output, batch):
        self.tokens += int(batch["labels"].ne(-100).sum())
        self.batches += 1

    def compute(self):
        return self.tokens / self.batches


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 8)
        self.head = torch.nn.Linear(8, 7)

    def forward(self, ids, labels):
        return {"logits": self.head(self.embed(ids))}


@dataclass(frozen=True)
class Language(Recipe):
    """The next number, in sequences of several lengths."""

    METRIC = ("perplexity", "min")

    def model(self):
        return Net()

    def data(self, request):
        start = torch.arange(24)[:, None]
        ids = (start + torch.arange(6)) % 7
        labels = (ids + 1) % 7
        labels[torch.arange(6) > start % 5 + 1] = -100
        part = TensorSet({"ids": ids, "labels": labels})
        return Splits("numbers", "generated", part.first(16), part.split(16)[1], part.first(4))

    def loss(self, output, batch):
        logits = output["logits"]
        token = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return {"token": token, "size": 1e-3 * logits.square().mean()}

    def count(self, batch):
        return int(batch["labels"].ne(-100).sum())

    def metrics(self):
        return {"perplexity": Perplexity(), "right": "accuracy", "tokens": Count()}
'''
YAML = """# @package _global_
recipe: {name: numbers, target: own_language.Language}
train: {epochs: 2, batch_size: 4, eval_batch_size: 4, lr: 0.5, optimizer: {name: sgd}}
"""


def own_recipe(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a run of a user's recipe."""
    Path("configs/recipe").mkdir(parents=True)
    Path("configs/recipe/numbers.yaml").write_text(YAML, encoding="utf-8")
    Path("own_language.py").write_text(CLASS, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "own_language", raising=False)
    return ["--config-dir", "configs", "recipe=numbers"]


def raw(run: str = "run") -> Any:
    return json.loads((Path(run) / "summary.json").read_text(encoding="utf-8"))


def test_every_metric_and_part_is_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*own_recipe(monkeypatch), "run.dir=run"]) == 0
    assert raw()["memory_bytes"]["peak"] > 0  # planned on tensors without values to count
    assert conforms(raw(), Summary)
    summary, content = read_summary(Path("run")), raw()
    assert content["metric"] == {"name": "perplexity", "higher_is_better": False}
    names = ["loss", "loss.token", "loss.size", "perplexity", "right", "tokens"]
    assert list(content["metrics"]) == names
    last = content["history"][-1]
    for name in names:
        row = content["metrics"][name]
        assert set(row) == {"train", "validation", "test"}
        assert all(isinstance(value, float) for value in row.values())
        for split in ("train", "validation"):
            shown = last[split]["loss"] if name == "loss" else last[split]["metrics"][name]
            assert row[split] == shown
    # The perplexity is that of the token loss, since both are means over tokens.
    for split in ("validation", "test"):
        token, perplexity = (content["metrics"][x][split] for x in ("loss.token", "perplexity"))
        assert perplexity == pytest.approx(torch.tensor(token).double().exp().item(), rel=1e-5)
    # The first 16 samples have 2, 3, 4, 5, 6 tokens in turn; the metric counts per batch of 4.
    lengths = [n % 5 + 2 for n in range(24)]
    assert content["metrics"]["tokens"]["train"] == sum(lengths[:16]) / 4
    assert content["metrics"]["tokens"]["validation"] == sum(lengths[16:]) / 2
    steps = [line for line in read_lines(Path("run")) if line["kind"] == "step"]
    for line in steps:
        assert line["loss.token"] + line["loss.size"] == pytest.approx(line["loss"], rel=1e-6)
    (first, _) = [line for line in read_lines(Path("run")) if line["kind"] == "validation"]
    assert first["metrics"] == content["history"][0]["validation"]["metrics"]
    out = capsys.readouterr().out
    assert f"{summary.test.value('perplexity'):.4f}" in out
    assert "test perplexity" in out
    assert "test loss.token" in out


def test_a_resumed_run_is_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    words = own_recipe(monkeypatch)
    assert main([*words, "run.dir=whole"]) == 0
    assert main([*words, "run.dir=run", "train.max_steps=6"]) == 0  # within the second epoch
    assert main(["run.resume=run", "train.max_steps=8"]) == 0
    assert_same_run(Path("run"), Path("whole"))
    assert raw("run")["metrics"] == raw("whole")["metrics"]


def test_a_comparison_is_by_the_metric(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*own_recipe(monkeypatch), "train.max_steps=2"]
    for mode, seed in (("fp32", 0), ("fp32", 1), ("bf16_mixed", 0), ("bf16_mixed", 1)):
        given = [f"precision={mode}", f"seed={seed}", f"run.dir=runs/{mode}-{seed}"]
        assert main([*words, *given]) == 0
    assert main(["compare", "runs", "compare.dir=table"]) == 0
    table = json.loads(Path("table/comparison.json").read_text(encoding="utf-8"))
    assert (table["metric"], table["higher_is_better"]) == ("perplexity", False)
    assert table["is_relative"] is True
    base = table["variants"][0]["metric"]["value"]
    tests = [raw(f"runs/fp32-{seed}")["metrics"]["perplexity"]["test"] for seed in (0, 1)]
    assert base == pytest.approx(sum(tests) / 2)
    assert "perplexity" in capsys.readouterr().out
