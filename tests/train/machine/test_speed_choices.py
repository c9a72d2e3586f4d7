"""The table of choices that change a step's time and not what it computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mprun.optim import engines
from mprun.train.machine.speed_choices import OneDnnLinear, SpeedChoice, choose, use_onednn


@pytest.mark.parametrize(
    ("speed", "device", "dtype", "optimizer", "amx", "memory_format", "implementation"),
    [
        ("plain", "cpu", "float32", "adamw", False, "contiguous", "forloop"),
        ("plain", "cpu", "bfloat16", "sgd", False, "contiguous", "forloop"),
        ("plain", "cuda", "float32", "adamw", False, "contiguous", "foreach"),
        ("auto", "cuda", "float32", "adamw", False, "contiguous", "fused"),
        ("auto", "cuda", "bfloat16", "sgd", False, "contiguous", "foreach"),
        # What reads on the device whether a step is skipped
        ("auto", "cuda", "float16", "sgd", False, "contiguous", "fused"),
        ("auto", "cuda", "float16", "rmsprop", False, "contiguous", "triton"),
        ("auto", "cpu", "float32", "adamw", True, "channels_last", "fused"),
        ("auto", "cpu", "bfloat16", "adamw", True, "contiguous", "fused"),
        ("auto", "cpu", "bfloat16", "adamw", False, "channels_last", "fused"),
        ("auto", "cpu", "float16", "adamw", False, "contiguous", "fused"),
        ("auto", "cpu", "float32", "sgd", False, "channels_last", "forloop"),
        ("auto", "cpu", "bfloat16", "rmsprop", True, "contiguous", "c"),
    ],
)
def test_the_table(
    speed: str,
    device: str,
    dtype: str,
    optimizer: str,
    amx: bool,
    memory_format: str,
    implementation: str,
) -> None:
    expected = SpeedChoice(memory_format, implementation)
    assert choose(speed, device, dtype, optimizer, amx) == expected


def test_without_kernels_rmsprop_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "fastest", lambda device, formula: "eager")
    assert choose("auto", "cpu", "float32", "rmsprop") == SpeedChoice("channels_last", "forloop")


def test_images_take_the_memory_format_and_keep_their_values() -> None:
    images, rows = torch.rand(2, 3, 4, 4), torch.rand(2, 3)
    last = SpeedChoice("channels_last", "forloop")
    assert last.torch_memory_format is torch.channels_last
    assert last.inputs(images).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last.inputs(images), images)
    assert last.inputs(rows) is rows


def test_products_by_onednn_are_those_of_the_layer() -> None:
    """Float32 sums of 4,000 products in another order: a few units of 2^-24 of their size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4_000, 2_000), nn.Linear(2_000, 3, bias=False))
    exact, x = copy.deepcopy(model).double(), torch.randn(2, 4, 4_000, requires_grad=True)
    use_onednn(model)
    assert [type(m) for m in model] == [OneDnnLinear, OneDnnLinear]
    twin = copy.deepcopy(model)
    for m, given in ((twin, x), (exact, x.detach().double().requires_grad_())):
        m(given).square().sum().backward()
    for ours, theirs in zip(twin.parameters(), exact.parameters(), strict=True):
        error = ours.grad - theirs.grad  # type: ignore[operator]
        assert error.norm() < 1e-6 * theirs.grad.norm()  # type: ignore[union-attr]
    assert all(p.grad is None for p in model.parameters())
    small = torch.randn(1, 4_000)  # below MIN_FLOPS: the layer's own product
    assert torch.equal(model[0](small), nn.Linear.forward(model[0], small))


def test_products_by_onednn_have_derivatives_of_any_order_and_transforms() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3_000, 2_000), torch.randn(8, 3_000)

    def penalty(weight: Tensor) -> Tensor:
        output = functional_call(layer, {"weight": weight}, (x,))
        (inner,) = torch.autograd.grad(output.tanh().sum(), weight, create_graph=True)
        return inner.square().sum()

    weight = layer.weight.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(penalty(weight), weight)
    samples = vmap(lambda row: layer(row[None]).sum())(x)
    use_onednn(layer)
    (found,) = torch.autograd.grad(penalty(weight), weight)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    rows = torch.stack([x, -x])
    both = vmap(layer)(rows)
    assert torch.allclose(both, torch.stack([layer(x), layer(-x)]), rtol=1e-4, atol=1e-4)
    assert torch.allclose(samples, layer(x).sum(1), rtol=1e-3, atol=1e-3)


def test_a_subclass_of_linear_keeps_its_own_products() -> None:
    class Halved(nn.Linear):
        pass

    model = nn.Sequential(Halved(2, 2))
    use_onednn(model)
    assert type(model[0]) is Halved
