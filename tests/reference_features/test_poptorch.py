"""PopTorch's half precision on FashionMNIST (rows D1 to D14)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mprun.config import compose
from mprun.recipes.fashion_mnist import FashionMnist
from tests.reference_features.runs import (
    FASHION,
    compared,
    recipes_page,
    run,
    written,
)

pytestmark = pytest.mark.usefixtures("one_traced_step", "quick_runs")


def test_d7_the_fashion_mnist_recipe_is_the_published_one() -> None:
    """tests/recipes/test_fashion_mnist.py has the sizes of its layers and its loss."""
    config = compose(["recipe=fashion_mnist"]).config
    train = config.train
    assert (train.batch_size, train.eval_batch_size, train.epochs, train.lr) == (12, 32, 10, 1e-3)
    assert train.optimizer.name == "adamw"
    recipe = FashionMnist(**config.recipe.model)
    model = recipe.model()
    images = torch.randint(256, (2, 1, 28, 28), dtype=torch.uint8)
    prepared = recipe.prepare(images)
    assert prepared.shape == (2, 1, 128, 128)
    resized = F.interpolate(images.float(), size=(128, 128), mode="bilinear").round() / 255
    torch.testing.assert_close(prepared, (resized - 0.5) / 0.5)
    # The layers by hand, in the published order.
    x = F.max_pool2d(F.relu(model.conv1(prepared)), 2)
    x = model.norm(F.relu(model.conv2(x))).flatten(1)
    expected = F.log_softmax(model.fc2(F.relu(model.fc1(x))), 1)
    torch.testing.assert_close(model(prepared), expected)


def test_d8_the_log_softmax_runs_over_the_classes_or_as_published_over_the_batch() -> None:
    """tests/recipes/test_fashion_mnist.py has the sums over either."""
    assert compose(["recipe=fashion_mnist"]).config.recipe.model["log_softmax_dim"] == 1
    run("recipe.model.log_softmax_dim=0", recipe=FASHION)
    assert "log_softmax_dim=0" in recipes_page()


def test_d9_the_published_figures_stand_beside_the_measured_ones() -> None:
    run("precision=fp32", recipe=FASHION, steps=2, name="outputs/a")
    run("precision=half_sr", recipe=FASHION, steps=2, name="outputs/b")
    for text in (*compared("outputs/a", "outputs/b"), recipes_page()):
        for figure in ("about 0.84", "less than 1 point", "about 26 % less", "IPU"):
            assert figure in text, figure


def test_d10_the_footprints_of_two_modes_are_in_one_picture() -> None:
    words = [*FASHION, "precision=fp32,half_sr"]
    found = written("memory", *words, file="memory.json", name="plan")
    fp32, half = (mode["bytes"] for mode in found["modes"])
    count = sum(p.numel() for p in FashionMnist(28, 1).model().parameters())
    assert (fp32["parameters"], half["parameters"]) == (4 * count, 2 * count)
    assert fp32["gradients"] == 2 * half["gradients"] > 0  # those that are there at the peak
    assert half["peak"] < fp32["peak"]
    picture = (Path("plan") / "memory.svg").read_text(encoding="utf-8")
    assert "fp32" in picture
    assert "half_sr" in picture
