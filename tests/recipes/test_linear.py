"""The linear recipe is Habana's first example."""

from __future__ import annotations

import torch

from mprun.recipes.linear import Linear
from mprun.train.data import DataRequest

RECIPE = Linear(in_features=1024, out_features=512, samples=64)


def test_the_data_are_one_normal_batch_in_stored_order() -> None:
    splits = RECIPE.data(DataRequest(seed=1))
    assert splits.train.inputs.shape == (64, 1024)
    assert splits.train.targets.shape == (64, 512)
    assert splits.source == "generated"
    assert not splits.shuffle
    assert (len(splits.validation), len(splits.test)) == (0, 0)
    for values in (splits.train.inputs, splits.train.targets):
        # Five standard errors of the mean and of the deviation of 32768 normal draws.
        assert abs(values.mean()) < 5 / 32_768**0.5
        assert abs(values.std() - 1) < 5 / (2 * 32_768) ** 0.5


def test_the_data_depend_on_the_seed_alone() -> None:
    first, again, other = (RECIPE.data(DataRequest(seed=s)).train for s in (1, 1, 2))
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, other.inputs)


def test_the_loss_is_the_mean_square_and_there_is_no_accuracy() -> None:
    output, target = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert RECIPE.loss(output, (None, target)).item() == 2.5
    assert RECIPE.correct(output, (None, target)) is None
    assert RECIPE.METRIC == ("loss", "min")
    assert torch.equal(RECIPE.prepare(output), output)
