"""mprun adds nothing: its weights are those of a raw PyTorch loop, bit for bit.

`speed=plain`, CPU, same thread count; the tolerance is zero because no operation differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mprun.cli import main
from mprun.data import DataRequest
from mprun.recipes.fashion_mnist import FashionMnist
from mprun.recipes.linear import Linear
from mprun.recipes.mnist import Mnist
from tests.parity import raw_loop

CASES = {
    "linear": (
        Linear(1024, 512, 64),
        lambda p: torch.optim.SGD(p, lr=1e-3),
        64,
        500,
        0.0,
    ),
    "mnist": (
        Mnist(256),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9, eps=1e-7),
        8192,
        20,
        0.2,
    ),
    "fashion_mnist": (
        FashionMnist(128, 1),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        12,
        20,
        0.0,
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("name", CASES)
def test_weights_equal_a_raw_loop_bit_for_bit(name: str, precision: str) -> None:
    recipe, optimizer, batch_size, steps, held_out = CASES[name]
    words = [f"recipe={name}", f"precision={precision}", "speed=plain", "device=cpu", "run.dir=run"]
    words += [f"train.max_steps={steps}", "data.eval_limit=64"]
    if name != "linear":
        words.append("data.source=generated")
    assert main(words) == 0
    ours = torch.load(Path("run/checkpoints/last.pt"), weights_only=True)["model"]

    request = DataRequest(source="generated", validation_fraction=held_out)
    bf16 = precision == "bf16_mixed"
    raw = raw_loop.train(recipe, recipe.data(request), optimizer, batch_size, steps, bf16)
    for key, value in raw.state_dict().items():
        assert torch.equal(value, ours[key]), f"{key} differs"


def test_the_raw_loop_is_short() -> None:
    lines = Path(raw_loop.__file__).read_text(encoding="utf-8").splitlines()
    assert len([x for x in lines if x.strip()]) < 30
