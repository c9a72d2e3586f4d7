"""A recipe's `sample` is like the samples of its data, so that planning needs no data."""

from __future__ import annotations

import pytest
import torch

from mprun.assemble import load_recipe
from mprun.config import compose
from mprun.data import DataRequest, generated, sources


@pytest.mark.representative("linear", "fashion_mnist")
@pytest.mark.parametrize("name", ["linear", "mnist", "fashion_mnist", "char_gpt"])
def test_a_sample_has_the_shape_and_dtype_of_the_data(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "TRAIN_SAMPLES", 8)
    monkeypatch.setattr(sources, "draw", generated.draw.__wrapped__)  # not kept for other tests
    config = compose((f"recipe={name}",)).config
    recipe = load_recipe(config.recipe.target, config.recipe.model)
    data = recipe.data(DataRequest(source="generated", train_limit=4)).train
    with torch.device("meta"):
        sample = recipe.sample()
    assert sample is not None
    for have, want in ((sample.inputs, data.inputs), (sample.targets, data.targets)):
        assert have.shape[1:] == want.shape[1:]
        assert have.dtype == want.dtype
        assert have.is_meta
