"""A recipe's `sample` is like the samples of its data, so that planning needs no data."""

from __future__ import annotations

import pytest
import torch

from mprun.assemble import load_recipe
from mprun.config import compose
from mprun.config.reference import options
from mprun.data import DataRequest, sources
from mprun.nested import all_tensors

RECIPES = sorted(options("recipe"))


@pytest.mark.representative("linear", "fashion_mnist")
@pytest.mark.parametrize("name", RECIPES)
def test_a_sample_has_the_shape_and_dtype_of_the_data(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TRAIN_SAMPLES", 8)
    monkeypatch.setattr(sources, "draw", sources.draw.__wrapped__)  # not kept for other tests
    config = compose((f"recipe={name}",)).config
    recipe = load_recipe(config.recipe.target, config.recipe.model)
    data = recipe.data(DataRequest(source="generated", train_limit=4)).train
    with torch.device("meta"):
        sample = recipe.sample()
    assert sample is not None
    pairs = zip(all_tensors(sample.content), all_tensors(data.content), strict=True)
    for have, want in pairs:
        assert have.shape[1:] == want.shape[1:]
        assert have.dtype == want.dtype
        assert have.is_meta
