"""transformer and tabular have the weights of raw PyTorch loops, bit for bit.

Each loop is written out. `speed=plain`, the same thread count; the tolerance is zero because no
operation differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.data.text import python_library

STEPS = 4


def check(recipe: str, precision: str, raw: nn.Module, *words: str) -> None:
    """Train the recipe and compare its weights with those of the raw loop."""
    words = (f"recipe={recipe}", f"precision={precision}", *words, "speed=plain", "device=cpu")
    assert main([*words, f"train.max_steps={STEPS}", "data.eval_limit=32", "run.dir=run"]) == 0
    ours = torch.load(Path("run/checkpoints/last.pt"), weights_only=True)["trainer"]["model"]
    for key, value in raw.state_dict().items():
        assert torch.equal(value, ours[key]), f"{key} differs"


def order(samples: int, batch: int) -> Iterator[Tensor]:
    """The indices of the samples of each step."""
    drawn = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return (index for _, index in zip(range(STEPS), drawn.split(batch), strict=False))


@pytest.mark.representative("bf16_mixed")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_a_llama_from_its_config(precision: str) -> None:
    transformers = pytest.importorskip("transformers", reason="mprun[transformer]")
    text = python_library()
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.99), weight_decay=0.1)
    for starts in order(len(ids) - round(len(ids) * 0.1) - 32, 12):
        batch = torch.stack([ids[i : i + 32] for i in starts])
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16_mixed"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    sizes = ["layers=2", "width=64", "context=32", "vocabulary=128"]
    words = [f"recipe.model.{size}" for size in sizes]
    words += ["train.scheduler=none", "train.warmup_steps=0", "train.min_lr=0"]
    check("transformer", precision, model, *words, "data.source=generated")


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_an_mlp_on_digits(precision: str) -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="mprun[tabular]")
    selection = pytest.importorskip("sklearn.model_selection", reason="mprun[tabular]")
    features, classes = datasets.load_digits(return_X_y=True)
    inputs, _, targets, _ = selection.train_test_split(
        features, classes, test_size=0.2, random_state=0, stratify=classes
    )
    inputs, targets = torch.from_numpy(inputs).float() / 16, torch.from_numpy(targets)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    for index in order(1293, 32):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16_mixed"):
            output = model(inputs[index])
        F.cross_entropy(output.float(), targets[index]).backward()
        optimizer.step()
    check("tabular", precision, model)
