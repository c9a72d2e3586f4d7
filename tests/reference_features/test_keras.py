"""Keras mixed precision on MNIST: policies (rows C1 to C10)."""

from __future__ import annotations

import pytest
import torch

from mprun.config import compose
from mprun.recipes.mnist import Mnist
from mprun.train.data import DataRequest
from tests.reference_features.runs import mnist_compared, recipes_page, run, weights

pytestmark = pytest.mark.usefixtures("native_is_fast", "one_traced_step", "quick_runs")


def test_c1_the_two_dtypes_of_a_policy_are_recorded_and_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    effective = run("precision=bf16_mixed").effective
    assert (effective.compute_dtype, effective.param_dtype) == ("bfloat16", "float32")
    assert "policy: parameters float32, compute bfloat16" in capsys.readouterr().out
    assert {x.dtype for x in weights().values()} == {torch.float32}


def test_c5_the_mnist_recipe_is_the_published_one() -> None:
    """tests/recipes/test_mnist.py has its layers, weights, inputs and loss."""
    config = compose(["recipe=mnist"]).config
    train, optimizer = config.train, config.train.optimizer
    assert (train.batch_size, train.epochs, train.lr) == (8192, 5, 1e-3)
    assert (optimizer.name, optimizer.alpha, optimizer.eps) == ("rmsprop", 0.9, 1e-7)
    assert config.recipe.model["units"] == 256
    fraction = config.data.validation_fraction
    splits = Mnist(256).data(DataRequest(source="generated", validation_fraction=fraction))
    assert len(splits.train) / len(splits.validation) == 48_000 / 12_000


def test_c5_accuracy_and_loss_of_each_epoch_are_recorded() -> None:
    summary = run("data.validation_fraction=0.2", "train.epochs=2", steps=8)
    assert len(summary.history) == 2
    for epoch in summary.history:
        for scores in (epoch.train, epoch.validation):
            assert scores.accuracy is not None
            assert 0 <= scores.accuracy <= 1
            assert isinstance(scores.loss, float)
            assert scores.loss > 0
    assert summary.test.accuracy is not None


TRAINING = (0.5529, 0.7743, 0.8260, 0.8607, 0.8545)
VALIDATION = (0.7214, 0.7849, 0.8795, 0.8682, 0.8813)


def test_c6_the_published_run_stands_beside_the_measured_one() -> None:
    shown, page, _ = mnist_compared()
    for text in (page, recipes_page()):
        for figure in (*TRAINING, *VALIDATION, 0.8749, 0.4217):
            assert f"{figure:.4f}" in text
        assert "about 12 us" in text
    assert "0.8749" in shown


def test_c9_the_number_of_units_can_be_set() -> None:
    run("recipe.model.units=64")
    assert weights()["0.weight"].shape == (64, 784)
    assert compose(["recipe=mnist"]).config.recipe.model["units"] == 256


def test_c10_the_published_claims_stand_beside_the_measured_speed() -> None:
    claims = ("more than 2 times", "up to 2 times", "60 % more", "significantly slower")
    for text in (*mnist_compared()[:2], recipes_page()):
        for claim in (*claims, "no benefit for toy models", "HPU"):
            assert claim in text, claim
