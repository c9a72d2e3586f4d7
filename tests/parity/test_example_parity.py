"""mprun adds nothing to a recipe in a file: three examples against a raw PyTorch loop, bit for bit.

`speed=plain`, CPU, same thread count; the tolerance is zero because no operation differs. Data are
made under random numbers that no seed changes, weights and the model's own draws come from the
run's seed, and so does the order of samples, from a generator of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from mprun.cli.main import main
from mprun.precision.nested import map_tensors
from tests.examples.recipes import EXAMPLES, recipe
from tests.parity.raw_loop import RawLoop, assert_same

SEED = 3
EPOCHS = 2


def example(name: str) -> ModuleType:
    """A module of the example's code, apart from the one that mprun makes."""
    module = ModuleType(name)
    exec(compile(EXAMPLES[name].read_text(encoding="utf-8"), name, "exec"), module.__dict__)
    return module


def data_of(module: ModuleType) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return module.data()


def epochs(module: ModuleType, data: Any, model: nn.Module) -> Iterator[Any]:
    """The batches of all epochs."""
    order = torch.Generator().manual_seed(SEED)
    for _ in range(EPOCHS):
        if isinstance(data, tuple):
            given = data[0]
            yield from DataLoader(given.dataset, given.batch_size, shuffle=True, generator=order)
        else:
            content = data["train"]
            total = len(content[0] if isinstance(content, tuple) else content["ids"])
            size = module.DEFAULTS["train.batch_size"]
            for index in torch.randperm(total, generator=order).split(size):
                yield map_tensors(lambda x: x[index], content)  # noqa: B023 - called at once
        if module.__name__ == "vae":  # it draws in validation too
            with torch.no_grad():
                for rows in data["validation"][0].split(16):
                    model(rows)


def raw_loop(
    name: str, make: Callable[[Any], torch.optim.Optimizer], forward: Callable[[Any, Any], Any]
) -> RawLoop:
    """The example's training written out."""
    module = example(name)
    data = data_of(module)
    torch.manual_seed(SEED)
    model = module.model()

    def loss(output: Any, batch: Any) -> Any:
        made = module.loss(output, batch)
        return sum(made.values()) if isinstance(made, dict) else made

    batches = epochs(module, data, model)
    optimizer = make(model.parameters())
    return RawLoop(model, optimizer, batches, lambda batch: forward(model, batch), loss)


CASES = {
    "vae": (
        lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0),
        lambda model, batch: model(*batch),
    ),
    "language_lstm": (
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0),
        lambda model, batch: model(**batch),
    ),
    "strings_adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda model, batch: model(batch["word"]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_example_equals_a_raw_loop_bit_for_bit(name: str) -> None:
    words = [recipe(name), "precision=fp32", "speed=plain", "device=cpu", f"seed={SEED}"]
    words += ["train.max_steps=null", f"train.epochs={EPOCHS}", "run.dir=run"]
    assert main(words) == 0
    assert_same(raw_loop(name, *CASES[name]), None)
