"""char_gpt's weights are those of a raw PyTorch loop, bit for bit.

The loop is written out: learning rate, clipping and windows of text are its own. `speed=plain`, the
same thread count; the tolerance is zero because no operation differs.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mprun.cli.main import main
from mprun.data.text import python_library
from mprun.recipes.char_gpt import Gpt
from mprun.records.run_record import read_lines

STEPS, WARMUP, BATCH, CONTEXT, VOCABULARY = 8, 3, 12, 16, 128
LAYERS, HEADS, WIDTH = 2, 4, 64
HIGH, LOW = 1e-3, 1e-4


def characters() -> Tensor:
    """The training part of the text: all but the last tenth."""
    text = python_library()
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text])
    return ids[: len(ids) - round(len(ids) * 0.1)]


def learning_rate(step: int) -> float:
    if step < WARMUP:
        return HIGH * (step + 1) / WARMUP
    fall = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
    return LOW + (HIGH - LOW) * fall


def raw_loop(bf16: bool) -> tuple[list[float], torch.nn.Module]:
    """Losses of all steps, and the trained model."""
    ids = characters()
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=HIGH, betas=(0.9, 0.99), weight_decay=0.1)
    order = torch.randperm(len(ids) - CONTEXT, generator=torch.Generator().manual_seed(0))
    losses = []
    for step, starts in zip(range(STEPS), order.split(BATCH), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        inputs = torch.stack([ids[i : i + CONTEXT] for i in starts])
        targets = torch.stack([ids[i + 1 : i + CONTEXT + 1] for i in starts])
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(inputs)
        loss = F.cross_entropy(output.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_losses_and_weights_equal_a_raw_loop_bit_for_bit(precision: str) -> None:
    words = ["recipe=char_gpt", f"precision={precision}", "speed=plain", "device=cpu"]
    words += ["data.source=generated", f"recipe.model.vocabulary={VOCABULARY}", "run.dir=run"]
    sizes = {"layers": LAYERS, "heads": HEADS, "width": WIDTH, "context": CONTEXT}
    words += [f"recipe.model.{name}={value}" for name, value in sizes.items()]
    words += [f"train.max_steps={STEPS}", f"train.warmup_steps={WARMUP}"]
    words += [f"train.batch_size={BATCH}", "data.eval_limit=64"]
    assert main(words) == 0
    ours = torch.load(Path("run/checkpoints/last.pt"), weights_only=True)["trainer"]["model"]
    steps = [line["loss"] for line in read_lines(Path("run")) if line["kind"] == "step"]

    losses, model = raw_loop(precision == "bf16_mixed")
    assert steps == losses
    for key, value in model.state_dict().items():
        assert torch.equal(value, ours[key]), f"{key} differs"
