"""Recipes, mistakes and records of several processes, by whole runs on gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mprun.cli.main import main
from mprun.records.run_record import read_lines, read_summary
from tests.train.parallel.processes import Groups, own_errors

LINEAR = ["recipe=linear", "data.source=generated", "speed=plain"]
HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
DEFAULTS = {"train.lr": 1e-2, "train.batch_size": 4, "train.max_steps": 6}


def model():
    return nn.Linear(8, 1)
"""
MEAN = """
def loss(output, batch):
    return ((output - batch[1]) ** 2).mean()
"""
SETS = """
def data():
    return TensorDataset(X, Y), TensorDataset(X[:5], Y[:5])
"""
LOADERS = """
def data():
    train = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    return train, DataLoader(TensorDataset(X[:5], Y[:5]), batch_size=4)
"""
COUNTED = """
def count(batch):
    return int((batch[1] > 0).sum())


def loss(output, batch):
    counts = batch[1] > 0
    return ((output - batch[1]) ** 2)[counts].mean()
"""
PARTS = """
def loss(output, batch):
    parts = {"all": ((output - batch[1]) ** 2).mean()}
    large = batch[1] > 3
    if large.any():
        parts["large"] = output[large].abs().mean()
    return parts
"""
METRICS = """
METRIC = ("r2", "max")


class R2:
    def __init__(self):
        self.outputs, self.targets = [], []

    def update(self, output, batch):
        self.outputs.append(output.detach().clone())
        self.targets.append(batch[1].clone())

    def compute(self):
        outputs, targets = torch.cat(self.outputs), torch.cat(self.targets)
        if len(targets) < 4:
            raise ValueError("too few samples")
        return 1 - ((outputs - targets) ** 2).sum() / ((targets - targets.mean()) ** 2).sum()
"""
MERGE = """
    def merge_state(self, other):
        self.outputs += other.outputs
        self.targets += other.targets
"""
USED = """

def metrics():
    return {"r2": R2(), "signs": "accuracy"}
"""


def recipe(*pieces: str) -> str:
    """The override of a recipe of these pieces."""
    Path("own.py").write_text(HEAD + "\n\n".join(pieces), encoding="utf-8")
    return "recipe=own.py"


def figures(folder: str) -> dict[str, Any]:
    """Losses and scores of a run."""
    summary = read_summary(Path(folder))
    steps = [line for line in read_lines(Path(folder)) if line["kind"] == "step"]
    return {
        "losses": [line["loss"] for line in steps],
        "parts": [line.get("loss.all", 0.0) for line in steps],
        "scores": {
            name: [row.train, row.validation] for name, row in sorted(summary.metrics.items())
        },
    }


def flat(value: Any) -> list[float]:
    """All numbers; None is left out."""
    if isinstance(value, dict):
        return [x for item in value.values() for x in flat(item)]
    if isinstance(value, list):
        return [x for item in value for x in flat(item)]
    return [] if value is None else [float(value)]


@pytest.mark.representative("merged-ddp", "counted-fsdp2", "loaders-ddp", "parts-ddp")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((MEAN, SETS, METRICS + MERGE + USED), id="merged"),
        pytest.param((COUNTED, SETS), id="counted"),
        pytest.param((MEAN, LOADERS), id="loaders"),
        pytest.param((PARTS, SETS), id="parts"),
    ],
)
def test_recipes_train_and_score_as_in_one_process(
    groups: Groups, pieces: tuple[str, ...], kind: str
) -> None:
    words = [recipe(*pieces), "speed=plain", "train.max_steps=9"]
    assert main([*words, "train.accumulate=2", "run.dir=one"]) == 0
    ended = groups.run([*words, f"parallel={kind}", "run.dir=many"])
    assert ended.statuses == [0, 0], ended.errors
    one, many = figures("one"), figures("many")
    assert one["scores"].keys() == many["scores"].keys()
    # the means of parts of a batch are added up in float64 and in float32
    assert flat(many) == pytest.approx(flat(one), rel=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_last_batch_may_give_processes_unequal_shares(groups: Groups, kind: str) -> None:
    """33 samples: one process has 16, in one pass, the other one 17, in two."""
    words = [*LINEAR, "train.batch_size=16", "train.accumulate=2", "data.train_limit=33"]
    ended = groups.run([*words, "train.epochs=2", f"parallel={kind}", "run.dir=many"])
    assert ended.statuses == [0, 0], ended.errors
    assert main([*words, "train.epochs=2", "train.accumulate=4", "run.dir=one"]) == 0
    assert flat(figures("many")) == pytest.approx(flat(figures("one")), rel=1e-5)


def test_a_set_smaller_than_the_processes_trains(groups: Groups) -> None:
    words = [*LINEAR, "data.train_limit=2", "data.eval_limit=1", "train.max_steps=4"]
    ended = groups.run([*words, "parallel=ddp", "run.dir=many"], 3)
    assert ended.statuses == [0, 0, 0], ended.errors
    assert main([*words, "run.dir=one"]) == 0
    assert flat(figures("many")) == pytest.approx(flat(figures("one")), rel=1e-5)


def test_the_record_is_the_first_processs(groups: Groups) -> None:
    words = [*LINEAR, "train.max_steps=20", "precision=bf16_mixed"]
    more = ["precision.reduce_dtype=bfloat16", "parallel=ddp", "run.dir=run"]
    ended = groups.run([*words, *more], environment={"FOOTPRINT": "real"})
    assert ended.statuses == [0, 0], ended.errors
    assert not ended.out[1]
    summary = read_summary(Path("run"))
    assert summary.memory_bytes.peak is None
    assert "(it is counted for one process alone, not for 2 of ddp)" in ended.out[0]
    row = summary.parallel
    assert (row.kind, row.world_size) == ("ddp", 2)
    assert row.slowest_ms is not None
    assert row.fastest_ms is not None
    assert row.communication_share is not None
    assert 0 < row.fastest_ms <= row.slowest_ms
    assert 0 < row.communication_share < 1
    assert summary.requested.reduce_dtype == summary.effective.reduce_dtype == "bfloat16"
    assert summary.batch_size == summary.batch.effective == 2 * summary.batch.micro
    assert summary.variant == "bf16_mixed ddp-2"
    assert "world_size: 2" in Path("run/config.yaml").read_text(encoding="utf-8")
    assert len([x for x in read_lines(Path("run")) if x["kind"] == "step"]) == 20


def test_one_process_sends_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel=ddp", "precision.reduce_dtype=bfloat16", "train.max_steps=2", "run.dir=run"]
    assert main([*LINEAR, *words]) == 0
    warned = capsys.readouterr().err
    assert "parallel has no effect: there is one process" in warned
    assert "precision.reduce_dtype has no effect" in warned
    summary = read_summary(Path("run"))
    assert summary.parallel.kind == "none"
    assert summary.effective.reduce_dtype == "float32"
    assert main([*LINEAR, "train.max_steps=2", "run.dir=plain"]) == 0
    assert read_summary(Path("plain")).variant_hash == summary.variant_hash


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (LINEAR, "torchrun started 2 processes, and parallel=none trains in one"),
        ([*LINEAR, "parallel=ddp", "parallel.world_size=4"], "torchrun decides it"),
        (
            [*LINEAR, "parallel=ddp", "precision=half_sr", "precision.accum_dtype=float32"],
            "DDP and FSDP2 keep gradients in the parameters' dtype, float16",
        ),
        (
            [*LINEAR, "parallel=fsdp2", "debug.fp_exceptions=log"],
            "debug.fp_exceptions=log with parallel=fsdp2",
        ),
    ],
)
def test_mistakes_are_one_line_and_status_2(groups: Groups, words: list[str], reason: str) -> None:
    ended = groups.run([*words, "run.dir=run"])
    assert ended.statuses == [2, 0]
    (line,) = own_errors(ended)
    assert reason in line
    assert not Path("run").exists()


def test_a_metric_that_cannot_be_merged_is_refused(groups: Groups) -> None:
    ended = groups.run([recipe(MEAN, SETS, METRICS + USED), "parallel=ddp", "run.dir=run"])
    assert ended.status == 2
    (line,) = own_errors(ended)
    assert "metric 'r2' has no merge_state(other)" in line


def test_nothing_that_counts_ends_all_processes(groups: Groups) -> None:
    none = COUNTED.replace("batch[1] > 0", "batch[1] > 99")
    ended = groups.run([recipe(none, SETS), "parallel=ddp", "run.dir=run"])
    assert ended.status == 1
    (line,) = own_errors(ended)
    assert "count returned 0 for all samples of a step" in line


def test_batches_that_cannot_be_shared_evenly_are_not_resumed(groups: Groups) -> None:
    words = [*LINEAR, "train.batch_size=8", "train.max_steps=2", "parallel=ddp", "run.dir=run"]
    assert groups.run(words).statuses == [0, 0]
    ended = groups.run(["run.resume=run", "train.max_steps=4"], 3)
    assert ended.status == 2
    (line,) = own_errors(ended)
    assert "batch of 16 samples cannot be split evenly over 3 processes" in line
    assert "1, 2, 4, 8, 16" in line


def test_a_study_trains_in_all_processes(groups: Groups) -> None:
    words = ["sweep", *LINEAR, "parallel=ddp", "train.max_steps=4"]
    more = ["precision=bf16_mixed", "precision.reduce_dtype=float32,bfloat16", "seeds=2"]
    ended = groups.run([*words, *more, "run.dir=study"])
    assert ended.statuses == [0, 0], ended.errors
    table = json.loads(Path("study/comparison.json").read_text(encoding="utf-8"))
    labels = [row["label"] for row in table["variants"]]
    assert sorted(labels) == [
        "bf16_mixed ddp-2",
        "bf16_mixed ddp-2 (precision.reduce_dtype=bfloat16)",
    ]
