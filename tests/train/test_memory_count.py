"""The memory of a step is counted after the first steps, and changes nothing of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.records.run_record import read_summary
from mprun.train import recorder
from tests.summaries import example
from tests.train.conftest import Fresh


@pytest.mark.representative("fp32")
@pytest.mark.parametrize("mode", ["fp32", "bf16_true", "bf16_sr"])
def test_a_run_of_short_steps_never_imports_the_compiler(
    mode: str, fresh: Fresh, tmp_path: Path
) -> None:
    """Its memory is counted in a real step, as the first fake tensor imports the compiler."""
    words = ["recipe=linear", "train.epochs=20", f"precision={mode}", "device=cpu"]
    words.append("execution=native")
    imported = fresh.imported([*words, "run.dir=run"], tmp_path)
    assert "torch._dynamo" not in imported
    counted = read_summary(tmp_path / "run").memory_bytes
    assert main([*words, "run.dir=fake"]) == 0
    assert read_summary(Path("fake")).memory_bytes == counted


def test_the_memory_is_counted_once_and_where_a_step_failed() -> None:
    calls = []

    def count(step_s: float | None) -> dict[str, int]:
        calls.append(step_s)
        return {"peak": 7}

    for status, steps, peak in (("completed", 2, 7), ("failed", 0, 7), ("interrupted", 0, None)):
        calls.clear()
        summary = example()
        summary.memory_bytes.peak = None
        counted = recorder.MemoryCount(summary, count, recorder.Stopwatch())
        for _ in range(steps):
            counted.on_steps([])
        counted.on_end(status)
        assert summary.memory_bytes.peak == peak
        assert len(calls) == (peak is not None)


RANDOM = """
import random
import numpy as np
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        random.random(), np.random.rand()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        x = x + random.random() + float(np.random.rand())
        return self.layer(nn.functional.dropout(x))


def model():
    return Model()


def data():
    x = torch.randn(64, 4)
    return {"train": (x, x.sum(1, keepdim=True))}


def loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


DEFAULTS = {"train.batch_size": 4, "train.max_steps": 20, "train.epochs": None}
"""


def test_the_count_touches_no_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.py").write_text(RANDOM)
    losses = []
    for name in ("early", "never"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mprun.train.sums.EVERY_S", 0.0)  # after each step
            if name == "never":
                patch.setattr(recorder.MemoryCount, "on_steps", lambda *_: None)
            assert main(["recipe=recipe.py", f"run.dir={name}", "device=cpu"]) == 0
        summary = read_summary(Path(name))
        assert (summary.memory_bytes.peak is None) == (name == "never")
        losses.append(summary.train.loss)
    assert losses[0] == losses[1]
