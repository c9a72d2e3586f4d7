"""Linear layers with formatted products equal torchao's emulation, and float64 arithmetic."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from mprun.precision import Precision
from mprun.precision.formats import NVFP4, quantise
from mprun.precision.gemms import (
    GEMMS,
    PRODUCT_FORMATS,
    RECIPES,
    Gemm,
    LinearGemms,
    StepBits,
    compile_layers,
    convert_gemms,
    convert_natively,
    formatted_layers,
    gemms_of,
    linear,
    model_gemms,
    why_not_native,
)
from mprun.records.policy_columns import FORMAT_MODES
from tests.each import each

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


@each("dtype", [torch.float32, torch.bfloat16])
@each("shape", SHAPES)
@each("mode", RECIPES)
def test_float8_layers_are_those_of_torchao(
    mode: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight, bias, gradient = case(shape, dtype)
    layer = nn.Linear(shape[1], shape[2]).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    model = nn.Sequential(layer)
    convert_natively(model, ["0"], mode, emulate=True)
    assert type(model[0]).__name__ == "Float8Linear"
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


def test_layers_of_8_bits_are_compiled_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that keeps the ops, so that the results are those of the layers as they are."""
    compiled = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiled)
    torch._dynamo.reset()
    counters.clear()
    sizes = [32, 64, 64, 64, 48, 48, 48]  # four shapes of layers, two of them twice
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    model = nn.Sequential(*layers)
    names = [str(n) for n in range(len(layers))]
    convert_natively(model, names, "fp8_rowwise", emulate=True)
    twin = copy.deepcopy(model)
    compile_layers(twin)
    x = torch.randn(16, 32)
    for own in (model, twin, copy.deepcopy(twin)):
        own.zero_grad()
        own(x).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 4
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@each("dtype", [torch.float32, torch.bfloat16])
@each("shape", [(32, 64, 96), (96, 32, 128)])
def test_mxfp8_layers_are_those_of_torchao(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Its emulation with scales that are rounded up, and sums of `torch.mm` in `dtype`."""
    mx_mm = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear").mx_mm
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    kernel = importlib.import_module("torchao.quantization.quantize_.common.kernel_preference")
    x, weight, bias, gradient = case(shape, dtype)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    output = mx_mm.apply(
        *leaves,
        *[torch.float8_e4m3fn] * 3,
        32,
        kernel.KernelPreference.EMULATED,
        config.MXFP8Dim0CastKernelChoice.TORCH,
        config.MXFP8Dim1CastKernelChoice.TORCH,
        config.ScaleCalculationMode.RCEIL,
        False,
    )
    output.backward(gradient)
    ours = passes(GEMMS["mxfp8"], x, weight, torch.zeros_like(bias), gradient)[:3]
    for mine, theirs in zip(ours, [output.detach(), *(t.grad for t in leaves)], strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=torch.finfo(dtype).eps, atol=1e-6 * float(theirs.abs().max())
        )


@each("shape", [*SHAPES, (10, 50, 7)])
@each("mode", GEMMS)
def test_products_are_those_of_rounded_factors_in_float64(
    mode: str, shape: tuple[int, int, int]
) -> None:
    """Up to the order of float32 additions: K sums of relative error 2^-24 each."""
    gemms = GEMMS[mode]
    x, weight, bias, gradient = case(shape, torch.float32)

    def exact(a: Tensor, b: Tensor, gemm: Gemm) -> tuple[Tensor, Tensor]:
        a = a if gemm.left is None else quantise(a.contiguous(), gemm.left)
        b = b if gemm.right is None else quantise(b.contiguous(), gemm.right)
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


def test_more_dimensions_are_samples() -> None:
    x, weight, bias, gradient = case((24, 32, 16), torch.float32)
    flat = passes(GEMMS["mxfp8"], x, weight, bias, gradient)
    cube = passes(GEMMS["mxfp8"], x.view(2, 12, 32), weight, bias, gradient.view(2, 12, 16))
    for a, b in zip(flat, cube, strict=True):
        assert torch.equal(a, b.view(a.shape))


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


# ---- a format for each product -------------------------------------------------------------------


def test_each_product_has_its_own_format() -> None:
    x, weight, bias, gradient = case(SHAPES[0], torch.float32)
    high = passes(LinearGemms(), x, weight, bias, gradient)
    for position, name in enumerate(LinearGemms._fields):
        found = passes(gemms_of({name: "nvfp4"}), x, weight, bias, gradient)
        differ = [n for n in range(3) if not torch.equal(found[n], high[n])]
        assert differ == [position], name


@each(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_product_in_16_bits_has_factors_and_result_of_that_dtype(
    name: str, dtype: torch.dtype
) -> None:
    x, weight, *_ = case(SHAPES[0], torch.float32)
    result = linear(x, weight, None, PRODUCT_FORMATS[name])
    assert torch.equal(result, (x.to(dtype) @ weight.to(dtype).t()).float())


# ---- the Hadamard transform ----------------------------------------------------------------------


@each("samples", [16, 48, 50])
def test_a_transform_of_both_factors_changes_no_exact_product(samples: int) -> None:
    """H is orthogonal: float32 errors of 16 additions, twice, remain."""
    bits = StepBits(7)
    a, b = torch.randn(9, samples), torch.randn(5, samples)
    rotated = bits.rotated(a) @ bits.rotated(b).t()
    torch.testing.assert_close(rotated, a @ b.t(), rtol=1e-5, atol=1e-4)
    assert torch.equal(bits.rotated(a), StepBits(7).rotated(a))
    assert not torch.equal(bits.rotated(a), StepBits(8).rotated(a))


def test_the_transform_is_that_of_gradients_of_weights_alone() -> None:
    model, plain = mlp(), mlp()
    for made, hadamard in ((model, True), (plain, False)):
        convert_gemms(made, model_gemms(made, {}, "nvfp4", hadamard), StepBits(0))
        made(torch.randn(32, 32, generator=torch.Generator().manual_seed(1))).sum().backward()
    grads, expected = ([p.grad for p in m[1].parameters()] for m in (model, plain))
    assert not torch.equal(grads[0], expected[0])
    assert torch.equal(grads[1], expected[1])  # the bias's, which follows from grad_input
    assert torch.equal(model[0].bias.grad, plain[0].bias.grad)


# ---- whole models --------------------------------------------------------------------------------


def mlp(layers: int = 4, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def prepared(mode: str, layers: object = None, model: nn.Module | None = None) -> Precision:
    made = Precision(mode, device="cpu", execution="emulated", layers=layers)  # type: ignore[arg-type]
    made.prepare(mlp() if model is None else model)
    return made


@each("mode", FORMAT_MODES)
def test_inner_layers_are_converted_and_the_execution_is_emulated(mode: str) -> None:
    found = prepared(mode)
    assert found.converted_gemms == ["1", "2"]
    assert found.execution == "emulated"
    assert found.columns["gemms"] == mode
    assert [x.op for x in found.substitutions] == ["linear"]


def test_layers_by_name_have_formats_in_any_mode() -> None:
    layers = {"0": "fp8", "3": {"forward": "mxfp8", "grad_weight": "fp32"}}
    found = prepared("fp32", layers)
    assert found.converted_gemms == ["0", "3"]
    assert found.columns["gemms"] == "layers"
    model = mlp()
    made = Precision("fp32", device="cpu", execution="emulated", layers=layers)
    made.prepare(model)
    x = torch.randn(8, 32)
    hidden = linear(x, model[0].weight, model[0].bias, PRODUCT_FORMATS["fp8"])
    for n in (1, 2):
        hidden = nn.functional.linear(hidden, model[n].weight, model[n].bias)
    expected = linear(hidden, model[3].weight, model[3].bias, gemms_of({"forward": "mxfp8"}))
    assert torch.equal(made.forward(model, x), expected)


def test_a_named_layer_keeps_out_of_the_format_of_the_mode() -> None:
    assert prepared("mxfp8", {"1": "bf16"}).converted_gemms == ["2"]
    assert prepared("mxfp8", {"1": {"forward": "fp8"}}).converted_gemms == ["1", "2"]


@each(
    ("mode", "layers", "message"),
    [
        ("bf16_mixed", {"0": "fp9"}, "'fp9'; legal is a dtype or a mode"),
        ("bf16_mixed", {"0": {"forwards": "fp8"}}, "did you mean 'forward'"),
        ("bf16_mixed", {"0": {"forward": "bf16_mixed"}}, "legal for a product: fp32, fp16, bf16"),
        ("bf16_mixed", {"0": {}}, "names no product"),
        ("half_sr_full", {"0": "fp8"}, "precision.gemms=layers with precision=half_sr_full"),
    ],
)
def test_what_no_layer_can_have_is_refused(mode: str, layers: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(mode, layers)


def test_a_format_needs_a_linear_layer_that_fits() -> None:
    odd = nn.Sequential(nn.Linear(10, 7), nn.ReLU())
    for name in ("0", "1"):
        with pytest.raises(ValueError, match=f"{name}: fp8 is a format of nn.Linear's products"):
            prepared("fp32", {name: "fp8"}, odd)
    with pytest.raises(ValueError, match="of 2 linear layers the first and the last keep theirs"):
        formatted_layers(mlp(2))


def test_why_products_are_not_native() -> None:
    cpu = torch.device("cpu")
    assert why_not_native("fp8_tensorwise", cpu) == "cpu has no float8 matmuls"
    assert why_not_native("nvfp4", cpu) == "mprun has no native products in nvfp4"
