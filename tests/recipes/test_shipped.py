"""What all shipped recipes have in common: samples to plan with, weights of a seed, legal sizes."""

from __future__ import annotations

import pytest
import torch

from mprun.config import compose
from mprun.config.reference import options
from mprun.errors import UsageError
from mprun.precision.nested import all_tensors
from mprun.recipe import Recipe
from mprun.train.assemble import recipe_of
from mprun.train.data import DataRequest, sources

RECIPES = sorted(options("recipe"))


def shipped(name: str, *overrides: str) -> Recipe:
    return recipe_of(compose((f"recipe={name}", *overrides)).config)


@pytest.mark.representative("linear", "fashion_mnist")
@pytest.mark.parametrize("name", RECIPES)
def test_a_sample_has_the_shape_and_dtype_of_the_data(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TRAIN_SAMPLES", 8)
    monkeypatch.setattr(sources, "draw", sources.draw.__wrapped__)  # not kept for other tests
    recipe = shipped(name)
    data = recipe.data(DataRequest(source="generated", train_limit=4)).train
    with torch.device("meta"):
        sample = recipe.sample()
    assert sample is not None
    pairs = zip(all_tensors(sample.content), all_tensors(data.content), strict=True)
    for have, want in pairs:
        assert have.shape[1:] == want.shape[1:]
        assert have.dtype == want.dtype
        assert have.is_meta


@pytest.mark.representative("mnist", "fashion_mnist")
@pytest.mark.parametrize("name", RECIPES)
def test_a_seed_gives_the_weights(name: str) -> None:
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(torch.cat([p.flatten() for p in shipped(name).model().parameters()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("name", "wrong", "legal"),
    [
        ("mnist", "units=0", "1 or more"),
        ("fashion_mnist", "image_size=11", "12 or more"),
        ("fashion_mnist", "log_softmax_dim=2", "1 or 0"),
        ("char_gpt", "heads=3", "a multiple of heads=3"),
        ("char_gpt", "vocabulary=257", "from 2 to 256"),
    ],
)
def test_a_size_that_cannot_be_is_refused(name: str, wrong: str, legal: str) -> None:
    with pytest.raises(UsageError, match=f"legal is {legal}") as raised:
        shipped(name, f"recipe.model.{wrong}")
    assert wrong in str(raised.value)
