"""The char_gpt recipe is nanoGPT's setting for a CPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mprun.cli.main import main
from mprun.recipes.char_gpt import Attention, CharGpt, Gpt
from mprun.records.run_record import read_summary

SIZES = {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocabulary": 65, "text": None}
PUBLISHED = CharGpt(4, 4, 128, 64, 65, None)


def test_the_model_has_nanogpts_parameters() -> None:
    """nanoGPT prints 0.80 M for it: 12 C^2 per block, tied embeddings, norms; no positions."""
    sizes = {name: p.numel() for name, p in PUBLISHED.model().named_parameters()}
    assert sum(sizes.values()) - sizes["positions.weight"] == 4 * (12 * 128**2 + 2 * 128) + 128 * 66
    assert not [name for name in sizes if name.endswith("bias")]


def test_weights_are_drawn_as_in_gpt2() -> None:
    torch.manual_seed(0)
    for name, weights in PUBLISHED.model().named_parameters():
        if weights.dim() < 2:
            assert torch.equal(weights, torch.ones_like(weights))
            continue
        std = 0.02 / 8**0.5 if "project" in name else 0.02
        # Five standard errors of the deviation of n normal draws.
        assert abs(weights.std().item() / std - 1) < 5 / (2 * weights.numel()) ** 0.5, name


def test_the_first_loss_is_that_of_a_guess() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 65, (16, 64))
    loss = PUBLISHED.loss(PUBLISHED.model()(ids), (None, ids.roll(-1, 1).to(torch.uint8)))
    assert abs(loss.item() - math.log(65)) < 0.1, "logits of small random weights are near zero"


def test_a_prediction_sees_no_later_character() -> None:
    torch.manual_seed(0)
    model = Gpt(65, 8, 2, 2, 16)
    ids = torch.randint(0, 65, (1, 8))
    changed = ids.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 65
    assert torch.equal(model(ids)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(ids)[:, 5:], model(changed)[:, 5:])


def test_attention_is_its_formula() -> None:
    torch.manual_seed(0)
    layer = Attention(16, 2).double()
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    parts = [p.view(3, 8, 2, 8).transpose(1, 2) for p in layer.qkv(x).split(16, 2)]
    scores = parts[0] @ parts[1].mT / 8**0.5
    scores.masked_fill_(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf)
    mixed = (scores.softmax(-1) @ parts[2]).transpose(1, 2).reshape(3, 8, 16)
    # float64: differences are of the order of additions.
    torch.testing.assert_close(layer(x), F.linear(mixed, layer.project.weight))


def test_a_text_of_ones_own_trains(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.txt").write_text("to be or not to be, " * 50, encoding="utf-8")
    words = ["recipe=char_gpt", "recipe.model.text=own.txt", "recipe.model.context=8"]
    words += ["train.max_steps=40", "train.warmup_steps=5", "train.lr=0.01", "run.dir=run"]
    assert main([*words, "recipe.model.width=32", "recipe.model.layers=1"]) == 0
    summary = read_summary(Path("run"))
    assert (summary.data.name[:8], summary.data.source) == ("own.txt ", "local")
    assert summary.history[-1].validation.loss < 0.7 * math.log(12), "the text repeats itself"
    assert f"{summary.data.name} (local)" in capsys.readouterr().out


def test_a_text_that_was_changed_is_not_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.txt").write_text("to be or not to be, " * 50, encoding="utf-8")
    words = ["recipe=char_gpt", "recipe.model.text=own.txt", "recipe.model.context=8"]
    words += ["recipe.model.width=8", "recipe.model.layers=1", "train.warmup_steps=0"]
    words += ["train.scheduler=none", "train.min_lr=0"]
    assert main([*words, "train.max_steps=4", "run.dir=run"]) == 0
    before = (Path("run") / "metrics.jsonl").read_bytes()
    Path("own.txt").write_text("to be or not to go, " * 50, encoding="utf-8")
    capsys.readouterr()
    assert main(["run.resume=run", "train.max_steps=8"]) == 2
    error = capsys.readouterr().err
    assert "the run was trained on own.txt " in error
    assert "put the data back, or begin a new run" in error
    assert (Path("run") / "metrics.jsonl").read_bytes() == before
    Path("own.txt").write_text("to be or not to be, " * 50, encoding="utf-8")
    assert main(["run.resume=run", "train.max_steps=8"]) == 0
