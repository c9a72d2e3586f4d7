"""mprun adds nothing to a recipe in a file: three examples against a raw PyTorch loop, bit for bit.

`speed=plain`, CPU, same thread count; the tolerance is zero because no operation differs. Data are
made under random numbers that no seed changes, weights and the model's own draws come from the
run's seed, and so does the order of samples, from a generator of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mprun.cli.main import main
from mprun.nested import map_tensors
from mprun.records.run_record import read_lines
from tests.examples.recipes import EXAMPLES, recipe
from tests.run.test_resume import trained

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


def in_memory(content: Any, size: int, order: torch.Generator) -> Iterator[Any]:
    """Batches of tensors in a random order."""
    total = len(content[0] if isinstance(content, tuple) else content["ids"])
    for index in torch.randperm(total, generator=order).split(size):
        yield map_tensors(lambda x: x[index], content)  # noqa: B023 - called at once


def batches(module: ModuleType, data: Any, order: torch.Generator) -> Callable[[], Iterator[Any]]:
    """One epoch after the other."""
    if isinstance(data, tuple):
        given = data[0]
        loader = DataLoader(given.dataset, given.batch_size, shuffle=True, generator=order)
        return lambda: iter(loader)
    return lambda: in_memory(data["train"], module.DEFAULTS["train.batch_size"], order)


def raw_loop(
    name: str, make: Callable[[Any], torch.optim.Optimizer], forward: Callable[[Any, Any], Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps, and the weights."""
    module = example(name)
    data = data_of(module)
    epoch = batches(module, data, torch.Generator().manual_seed(SEED))
    torch.manual_seed(SEED)
    model = module.model()
    optimizer = make(model.parameters())
    losses = []
    for _ in range(EPOCHS):
        for batch in epoch():
            optimizer.zero_grad()
            loss = module.loss(forward(model, batch), batch)
            if isinstance(loss, dict):
                loss = sum(loss.values())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if name == "vae":  # it draws in validation too
            with torch.no_grad():
                for rows in data["validation"][0].split(16):
                    model(rows)
    return losses, model.state_dict()


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
    losses, weights = raw_loop(name, *CASES[name])
    steps = [line for line in read_lines(Path("run")) if line["kind"] == "step"]
    assert [line["loss"] for line in steps] == losses
    found = trained(Path("run"))["model"]
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)
