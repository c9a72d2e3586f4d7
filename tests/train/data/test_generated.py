"""The generated set: always the same, balanced, learnable, soon drawn."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256

import pytest
import torch
import torch.nn.functional as F

from mprun.recipes.mnist import Mnist
from mprun.train.data import BatchForm, TensorBatches, TensorOrder, TensorSet
from mprun.train.data.sources import draw

CPU = torch.device("cpu")
DRAW_ON_ONE_THREAD = """
import torch
from hashlib import sha256
from mprun.train.data.sources import draw
torch.set_num_threads(1)
torch.rand(5)  # the global generator is no part of it
parts = draw()
for part in parts:
    for tensor in (part.inputs, part.targets):
        print(sha256(tensor.numpy().tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def parts() -> tuple[TensorSet, TensorSet]:
    """The training and the test part."""
    return draw()


@pytest.mark.exhaustive
def test_another_process_draws_the_same_bytes(parts: tuple[TensorSet, TensorSet]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRAW_ON_ONE_THREAD], capture_output=True, text=True, check=True
    )
    digests = done.stdout.split()
    here = [t.numpy().tobytes() for part in parts for t in (part.inputs, part.targets)]
    assert digests == [sha256(b).hexdigest() for b in here]


def test_ten_balanced_classes(parts: tuple[TensorSet, TensorSet]) -> None:
    for part in parts:
        counts = part.targets.bincount()
        expected = len(part) / 10
        assert len(counts) == 10
        # Five standard deviations of a class's count under a fair draw, sqrt(N 0.1 0.9).
        assert (counts - expected).abs().max() < 5 * (len(part) * 0.09) ** 0.5


def test_the_test_part_is_not_in_the_training_part(parts: tuple[TensorSet, TensorSet]) -> None:
    train, test = ({row.tobytes() for row in part.inputs.numpy()} for part in parts)
    assert len(train) == 60_000
    assert len(test) == 10_000
    assert not train & test


def test_the_mnist_recipe_learns_it_to_over_90_percent(
    parts: tuple[TensorSet, TensorSet],
) -> None:
    train, test = parts
    recipe = Mnist(units=128)
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9)
    batches = TensorBatches(train, 128, BatchForm(recipe.prepare), CPU)
    order = TensorOrder(len(train), seed=0, shuffle=True).draw()
    for _, batch in zip(range(150), batches.epoch(order), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.parts[0].inputs[0]), batch.parts[0].content[1]).backward()
        optimizer.step()
    with torch.no_grad():
        correct = recipe.correct(model(recipe.prepare(test.inputs)), test.content)
    assert correct / len(test) > 0.9
