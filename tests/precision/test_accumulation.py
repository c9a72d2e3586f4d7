"""Four accumulated micro-batches against the full batch, in each mode."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mprun.cli.main import main

# Signal to noise of the weights' change, at 6.02 dB a bit. float32 sums in another order: 132 dB
# measured. bfloat16 and float16 round each micro-batch's weight gradient once, at relative 2^-9 and
# 2^-12: 54 and 72 dB expected, 53 and 72 measured.
FLOOR_DB = {"fp32": 100.0, "tf32": 60.0, "bf16_mixed": 40.0, "fp16_mixed": 55.0}


def change(precision: str, batch_size: int, accumulate: int) -> torch.Tensor:
    """The weights' change in one SGD step of rate 1 on `mnist`."""
    folder = f"run-{batch_size}"
    words = ["recipe=mnist", f"precision={precision}", "data.source=generated", "speed=plain"]
    words += [f"train.batch_size={batch_size}", f"train.accumulate={accumulate}", "device=cpu"]
    words += ["train.optimizer.name=sgd", "train.lr=1", "train.max_steps=1", "data.eval_limit=8"]
    words.append("data.train_limit=64")
    assert main([*words, "recipe.model.units=64", f"run.dir={folder}"]) == 0
    after = torch.load(Path(folder) / "checkpoints/last.pt", weights_only=True)["trainer"]["model"]
    from mprun.recipes.mnist import Mnist

    torch.manual_seed(0)
    before = Mnist(64).model().state_dict()
    return torch.cat([(after[k] - before[k]).double().flatten() for k in before])


@pytest.mark.representative("fp32", "fp16_mixed")
@pytest.mark.parametrize("precision", FLOOR_DB)
def test_four_micro_batches_equal_the_full_batch(precision: str) -> None:
    whole, split = change(precision, 64, 1), change(precision, 16, 4)
    noise = (whole - split).square().sum().item()
    found = math.inf if noise == 0 else 10 * math.log10(whole.square().sum().item() / noise)
    assert found > FLOOR_DB[precision], f"{found:.1f} dB"
