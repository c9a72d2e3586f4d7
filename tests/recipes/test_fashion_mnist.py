"""The FashionMNIST recipe is the model of Graphcore's tutorial."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchvision import transforms

from mprun.recipes.fashion_mnist import FashionMnist

PUBLISHED = FashionMnist(image_size=128, log_softmax_dim=1)


def small_output(log_softmax_dim: int) -> Tensor:
    """Outputs [6, 10] of a model on small images."""
    torch.manual_seed(0)
    recipe = FashionMnist(image_size=28, log_softmax_dim=log_softmax_dim)
    output: Tensor = recipe.model()(torch.randn(6, 1, 28, 28))
    return output


def test_layers_and_parameter_counts() -> None:
    model = PUBLISHED.model()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n.endswith("weight")}
    assert shapes == {
        "conv1.weight": (5, 1, 3, 3),
        "conv2.weight": (12, 5, 5, 5),
        "norm.weight": (12,),
        "fc1.weight": (100, 41_772),
        "fc2.weight": (10, 100),
    }
    norm = model.get_submodule("norm")
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == 3
    assert sum(p.numel() for p in model.parameters()) == 50 + 1_512 + 24 + 4_177_300 + 1_010


@pytest.mark.parametrize("size", [12, 13, 28, 33, 128])
def test_the_model_takes_what_prepare_gives(size: int) -> None:
    recipe = FashionMnist(image_size=size, log_softmax_dim=1)
    prepared = recipe.prepare(torch.zeros(2, 1, 28, 28, dtype=torch.uint8))
    assert prepared.shape == (2, 1, size, size)
    assert recipe.model()(prepared).shape == (2, 10)


def test_bytes_are_scaled_to_minus_one_to_one() -> None:
    stored = torch.arange(256, dtype=torch.uint8).repeat(7)[: 2 * 784].view(2, 1, 28, 28)
    before = stored.clone()
    prepared = FashionMnist(image_size=28, log_softmax_dim=1).prepare(stored)
    assert prepared.dtype == torch.float32
    # One float32 rounding each of two orders of computing, at values up to 1.
    torch.testing.assert_close(prepared, (stored / 255 - 0.5) / 0.5, rtol=0, atol=3e-7)
    assert (prepared.min(), prepared.max()) == (-1, 1)
    assert torch.equal(stored, before)


def test_the_log_softmax_is_over_classes_or_over_the_batch() -> None:
    # Sums of 10 float32 exponentials of rounded logarithms.
    close = {"rtol": 0, "atol": 1e-5}
    over_classes, over_batch = small_output(1).exp(), small_output(0).exp()
    torch.testing.assert_close(over_classes.sum(1), torch.ones(6), **close)
    torch.testing.assert_close(over_batch.sum(0), torch.ones(10), **close)
    assert (over_batch.sum(1) - 1).abs().max() > 0.1


def test_the_output_is_float32_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = small_output(1)
    assert output.dtype == torch.float32
    # A softmax rounded to bfloat16 would miss 1 by up to 2^-9.
    torch.testing.assert_close(output.exp().sum(1), torch.ones(6), rtol=0, atol=1e-5)


def test_the_loss_is_the_negative_log_likelihood() -> None:
    output, target = small_output(1), torch.tensor([0, 1, 2, 3, 4, 5])
    loss = PUBLISHED.loss(output, (None, target))
    expected = -torch.stack([output[i, i] for i in range(6)]).mean()
    torch.testing.assert_close(loss, expected)
    correct = PUBLISHED.correct(output, (None, output.argmax(1)))
    assert correct.item() == 6
    assert PUBLISHED.correct(output, (None, (output.argmax(1) + 1) % 10)).item() == 0


def test_images_are_those_of_torchvisions_pipeline() -> None:
    """Resize a picture, make it a tensor, normalise: equal but for the resizer's last byte step."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 1, 28, 28), dtype=torch.uint8, generator=generator)
    pipeline = transforms.Compose(
        [
            transforms.ToPILImage(),
            transforms.Resize((128, 128)),
            transforms.ToTensor(),
            transforms.Normalize((0.5,), (0.5,)),
        ]
    )
    expected = torch.stack([pipeline(image) for image in images])
    found = FashionMnist(128, 1).prepare(images)
    # Pillow rounds after each of its two passes: some pixels are the next byte, 1/127.5 away.
    steps = (found - expected).abs() * 127.5
    assert steps.max() < 1.001
    assert steps.mean() < 0.25
