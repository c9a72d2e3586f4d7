"""The MNIST recipe is the model of Keras' guide."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mprun.recipes.mnist import Mnist

RECIPE = Mnist(units=256)


def linear_layers() -> list[nn.Linear]:
    return [m for m in RECIPE.model().modules() if isinstance(m, nn.Linear)]


def test_layers_and_parameter_count() -> None:
    shapes = [(layer.in_features, layer.out_features) for layer in linear_layers()]
    assert shapes == [(784, 256), (256, 256), (256, 10)]
    assert sum(p.numel() for p in RECIPE.model().parameters()) == 269_322
    assert sum(p.numel() for p in Mnist(units=64).model().parameters()) == 55_050


def test_weights_are_glorot_uniform_and_biases_zero() -> None:
    torch.manual_seed(0)
    for layer in linear_layers():
        bound = (6 / (layer.in_features + layer.out_features)) ** 0.5
        assert layer.weight.abs().max() <= bound
        # The standard error of the deviation of 2560 uniform draws, the fewest, is 0.9 %.
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not layer.bias.any()


def test_images_are_flattened_and_divided_by_255() -> None:
    images = torch.arange(256, dtype=torch.uint8).repeat(2 * 784 // 256 + 1)[: 2 * 784]
    stored = images.view(2, 1, 28, 28)
    before = stored.clone()
    prepared = RECIPE.prepare(stored)
    assert prepared.shape == (2, 784)
    assert prepared.dtype == torch.float32
    assert torch.equal(prepared.flatten(), images.float() / 255)
    assert torch.equal(stored, before)


def test_the_loss_is_cross_entropy_and_the_largest_output_counts() -> None:
    outputs = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 0.5]])
    targets = torch.tensor([0, 1, 2])
    assert torch.equal(RECIPE.loss(outputs, (None, targets)), F.cross_entropy(outputs, targets))
    assert RECIPE.correct(outputs, (None, targets)).item() == 2
    assert RECIPE.METRIC == ("accuracy", "max")
