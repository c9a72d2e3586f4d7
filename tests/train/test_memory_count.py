"""The memory of a step is counted after the first steps, and changes nothing of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mprun.cli.main import main
from mprun.config import compose
from mprun.records.run_record import read_summary
from mprun.train import recorder, user_code
from mprun.train.assemble import make_plan, recipe_of, step_memory
from tests.summaries import example
from tests.train.conftest import Fresh

OWN = """
import random
import numpy as np
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        random.random(), np.random.rand()
        self.words = nn.Embedding(32, 16)
        self.register_buffer("seen", torch.ones(4, 4).tril())
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.LSTM(16, 32, batch_first=True)
        self.last = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 1))

    def forward(self, x):
        x = self.words(x) + random.random() + float(np.random.rand())
        x, _ = self.layer(nn.functional.dropout(self.norm(self.seen @ x)))
        return self.last(x)


def model():
    return Model()


def data():
    x = torch.randint(32, (512, 4))
    return {"train": (x, x.float().unsqueeze(2))}


def loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


DEFAULTS = {"train.batch_size": 16, "train.max_steps": 20, "train.epochs": None}
"""
CASES = [("fp32", "native"), ("bf16_mixed", "emulated"), ("bf16_true", "emulated")]
CASES += [("fp16_mixed", "native"), ("half_sr_full", "emulated"), ("mxfp8", "emulated")]


@pytest.mark.representative("fp32-native", "bf16_mixed-emulated", "mxfp8-emulated")
@pytest.mark.parametrize(("mode", "execution"), CASES)
def test_a_run_of_short_steps_never_imports_the_compiler(
    mode: str, execution: str, fresh: Fresh, tmp_path: Path
) -> None:
    """Its memory is counted in a real step: the bytes of one on fake tensors, which import it."""
    (tmp_path / "own.py").write_text(OWN)
    words = [f"recipe={tmp_path / 'own.py'}", f"precision={mode}", "device=cpu"]
    words.append(f"execution={execution}")
    assert "torch._dynamo" not in fresh.imported([*words, "run.dir=run"], tmp_path)
    fake = step_memory(make_plan(compose(words).config, ()))
    assert fake.why_real is None
    counted = vars(read_summary(tmp_path / "run").memory_bytes)
    assert fake.totals == {name: counted[name] for name in fake.totals}


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


def test_the_count_touches_no_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.py").write_text(OWN)
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


def test_only_a_large_model_is_outlined_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, before = recipe_of(compose(["recipe=mnist"]).config), torch.get_rng_state()
    small = user_code.outline_of(recipe)
    monkeypatch.setattr(user_code._Small, "left", 1000)
    large = user_code.outline_of(recipe)
    devices = [{p.device.type for p in model.parameters()} for model in (small, large)]
    assert devices == [{"cpu"}, {"meta"}]
    assert torch.equal(torch.get_rng_state(), before)
