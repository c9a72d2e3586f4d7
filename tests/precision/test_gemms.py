"""Linear layers with formatted products equal torchao's emulation, and float64 arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mprun.precision.formats import NVFP4, quantise
from mprun.precision.gemms import GEMMS, HIGH, LinearGemms, StepBits, linear

TORCHAO = {
    "fp8_tensorwise": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_rowwise_hp": "rowwise_with_gw_hp",
}
SHAPES = [(32, 64, 48), (16, 16, 16), (80, 128, 32)]
"""Samples, features in and out."""


def case(shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """An input, a weight, a bias and a gradient of the output."""
    samples, features, outputs = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    x *= 2.0 ** torch.randint(-6, 6, (1, features), generator=generator)
    weight = torch.randn(outputs, features, generator=generator) / features**0.5
    bias = torch.randn(outputs, generator=generator)
    gradient = torch.randn(samples, outputs, generator=generator) * 1e-3
    return x.to(dtype), weight.to(dtype), bias.to(dtype), gradient.to(dtype)


def passes(
    gemms: LinearGemms, x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor
) -> list[Tensor]:
    """The output, and the gradients of input, weight and bias."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    output = linear(*leaves, gemms)
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", TORCHAO)
def test_float8_layers_are_those_of_torchao(
    mode: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    float8 = pytest.importorskip("torchao.float8")
    x, weight, bias, gradient = case(shape, dtype)
    layer = nn.Linear(shape[1], shape[2]).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    config = float8.Float8LinearConfig.from_recipe_name(TORCHAO[mode])
    object.__setattr__(config, "emulate", True)
    model = float8.convert_to_float8_training(nn.Sequential(layer), config=config)
    given = x.clone().requires_grad_()
    output = model(given)
    output.backward(gradient)
    expected = [output.detach(), given.grad, model[0].weight.grad, model[0].bias.grad]
    for name, ours, theirs in zip(
        ("output", "input", "weight", "bias"),
        passes(GEMMS[mode], x, weight, bias, gradient),
        expected,
        strict=True,
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("shape", [*SHAPES, (10, 50, 7)])
@pytest.mark.parametrize("mode", GEMMS)
def test_products_are_those_of_rounded_factors_in_float64(
    mode: str, shape: tuple[int, int, int]
) -> None:
    """Up to the order of float32 additions: K sums of relative error 2^-24 each."""
    gemms = GEMMS[mode]
    x, weight, bias, gradient = case(shape, torch.float32)

    def exact(a: Tensor, b: Tensor, gemm: object) -> tuple[Tensor, Tensor]:
        left, right, _ = gemm  # type: ignore[misc]
        a = a if left is None else quantise(a.contiguous(), left)
        b = b if right is None else quantise(b.contiguous(), right)
        return a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()

    expected = [
        exact(x, weight, gemms.forward),
        exact(gradient, weight.t(), gemms.grad_input),
        exact(gradient.t(), x.t(), gemms.grad_weight),
    ]
    results = passes(gemms, x, weight, torch.zeros_like(bias), gradient)[:3]
    terms = (shape[1], shape[2], shape[0])
    for result, (value, size), k in zip(results, expected, terms, strict=True):
        assert ((result.double() - value).abs() <= size * k * 2.0**-23).all()


def test_high_products_are_those_of_pytorch() -> None:
    x, weight, bias, gradient = case(SHAPES[0], torch.float32)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    output = nn.functional.linear(*leaves)
    output.backward(gradient)
    results = passes(LinearGemms(HIGH, HIGH, HIGH), x, weight, bias, gradient)
    for ours, theirs in zip(results, [output.detach(), *(t.grad for t in leaves)], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_more_dimensions_are_samples() -> None:
    x, weight, bias, gradient = case((24, 32, 16), torch.float32)
    flat = passes(GEMMS["mxfp8"], x, weight, bias, gradient)
    cube = passes(GEMMS["mxfp8"], x.view(2, 12, 32), weight, bias, gradient.view(2, 12, 16))
    for a, b in zip(flat, cube, strict=True):
        assert torch.equal(a, b.view(a.shape))


def test_a_second_derivative_is_refused() -> None:
    x, weight, *_ = case(SHAPES[0], torch.float32)
    weight.requires_grad_()
    (gradient,) = torch.autograd.grad(
        linear(x, weight, None, GEMMS["nvfp4"]).square().sum(), weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_gradients_in_nvfp4_are_right_on_average() -> None:
    """Of the gradient alone: the other factor is rounded to nearest, the same in every step."""
    x, weight, _, gradient = case((32, 64, 48), torch.float32)
    gradient = gradient.clamp(-2e-3, 2e-3)
    gradient[::16], gradient[:, ::16] = 2e-3, 2e-3  # the largest of each block, which is exact
    bits, count = StepBits(0), 400
    totals = [torch.zeros_like(x).double(), torch.zeros_like(weight).double()]
    squares = [torch.zeros_like(t) for t in totals]
    for step in range(count):
        bits.begin_step(step)
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        linear(*leaves, None, GEMMS["nvfp4"], bits).backward(gradient)
        for n, leaf in enumerate(leaves):
            assert leaf.grad is not None
            totals[n] += leaf.grad.double()
            squares[n] += leaf.grad.double().square()
    wide = gradient.double()
    exact = (
        wide @ quantise(weight.t().contiguous(), NVFP4).t().double(),
        wide.t() @ quantise(x.t().contiguous(), NVFP4).t().double(),
    )
    for total, square, expected in zip(totals, squares, exact, strict=True):
        mean = total / count
        deviation = (square / count - mean.square()).clamp_min(0).sqrt() / count**0.5
        # Six standard errors: one of 5,120 numbers is beyond with a probability of 1e-5.
        assert ((mean - expected).abs() <= 6 * deviation + 1e-4 * expected.abs().max()).all()


def test_the_bits_of_a_step_come_again() -> None:
    x, weight, _, gradient = case(SHAPES[0], torch.float32)

    def gradients(step: int) -> Tensor:
        bits = StepBits(3)
        bits.begin_step(step)
        leaf = weight.clone().requires_grad_()
        linear(x, leaf, None, GEMMS["nvfp4"], bits).backward(gradient)
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(gradients(1), gradients(1))
    assert not torch.equal(gradients(1), gradients(2))
