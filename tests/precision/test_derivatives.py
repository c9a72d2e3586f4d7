"""Second derivatives: in every mode, by `autograd.grad` with a graph, `torch.func`, and a penalty.

The numbers of a mode are those of a hand-written autocast loop, or of float64 with the factors that
the mode rounds.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, vmap

import mprun
from mprun.errors import RunFailedError
from mprun.precision import Precision
from mprun.precision.emulate import Emulated16
from mprun.precision.formats import quantise
from mprun.precision.gemms import GEMMS, Gemm, linear
from mprun.records.mode_names import SHIPPED_MODES
from mprun.records.policy_columns import FORMAT_MODES
from tests.precision import normal

RECIPE = """
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, vmap

DEFAULTS = {"train.lr": 1e-3, "train.batch_size": 8, "train.max_steps": 2}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        if KIND == "func":
            values = dict(self.net.named_parameters())
            one = lambda row: functional_call(self.net, values, (row,)).squeeze(-1)
            return self.net(x), vmap(grad(one))(x), vmap(hessian(one))(x[:2]).flatten(1)
        x.requires_grad_()  # evaluation computes such a batch with gradients
        u = self.net(x)
        if KIND == "attention":
            q = x.view(-1, 1, 4, 4)
            u = u * nn.functional.scaled_dot_product_attention(q, q, q).sum((1, 2, 3)).unsqueeze(1)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        if KIND != "second":
            return u, du, du
        return u, du, torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)[0]


def model():
    torch.manual_seed(0)
    return Model()


def data():
    x = torch.randn(24, 16)
    return {"train": (x, x[:, :1].sin()), "test": (x[:8], x[:8, :1].sin())}


def loss(output, batch):
    u, du, d2u = output
    residual = d2u[:, 0].square().mean()
    return (u - batch[1]).square().mean() + (du.norm(dim=1) - 1).square().mean() + residual
"""


def train(kind: str, mode: str, folder: Path) -> Any:
    (folder / "own.py").write_text(f"KIND = {kind!r}\n{RECIPE}")
    return mprun.run(f"recipe={folder / 'own.py'}", precision=mode, device="cpu").record


@pytest.mark.representative("fp8_rowwise-*", "half_sr_full-*", "tf32-func", "bf16_true-second")
@pytest.mark.parametrize("kind", ["second", "func", "penalty"])
@pytest.mark.parametrize("mode", SHIPPED_MODES)
def test_every_mode_trains(mode: str, kind: str, tmp_path: Path) -> None:
    """Evaluation too: its batches come without gradients, which the model needs there."""
    record = train(kind, mode, tmp_path)
    assert record.steps == 2
    assert torch.tensor(record.test.loss).isfinite()


def test_a_fused_kernel_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"no second derivative: .*SDPBackend\.MATH") as raised:
        train("attention", "bf16_mixed", tmp_path)
    assert "\n" not in str(raised.value)


class Pinn(nn.Module):
    """Gives its output and its second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        u = self.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u, torch.autograd.grad(du.square().sum(), x, create_graph=True)[0]


def test_native_bits_are_those_of_an_autocast_loop() -> None:
    ours, raw, x = Pinn(), Pinn(), normal(8, 16)
    precision = Precision("bf16_mixed", device="cpu", execution="native")
    precision.begin_step()
    u, d2u = precision.forward(precision.prepare(ours), x)
    precision.backward(precision.loss(lambda: u.square().mean() + d2u.square().mean()))
    with torch.autocast("cpu", torch.bfloat16):
        u, d2u = raw(x)
    (u.float().square().mean() + d2u.float().square().mean()).backward()
    for p, q in zip(ours.parameters(), raw.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def doubly(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The second derivatives of a linear layer, by input, weight and the output's gradient."""
    x, weight, h, of_x, of_weight = tensors
    moved = [t.clone().requires_grad_() for t in (x, weight, h)]
    gradients = torch.autograd.grad(function(*moved[:2]), moved[:2], moved[2], create_graph=True)
    return torch.autograd.grad(gradients, moved, (of_x, of_weight))


SHAPES = (48, 32), (16, 32), (48, 16), (48, 32), (16, 32)
FACTORS = [normal(*shape, seed=n) for n, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("mode", FORMAT_MODES)
def test_formats_are_those_of_the_three_products(mode: str) -> None:
    """Each within the rounding of float32 sums of float64, with the same rounded factors."""
    gemms, (x, weight, h, of_x, of_weight) = GEMMS[mode], FACTORS

    def exact(a: Tensor, b: Tensor, gemm: Gemm) -> tuple[Tensor, Tensor]:
        a = a if gemm.left is None else quantise(a.contiguous(), gemm.left)
        b = b if gemm.right is None else quantise(b.contiguous(), gemm.right)
        return a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()

    one, other = exact(of_x, weight, gemms.forward), exact(x, of_weight, gemms.forward)
    expected = (
        exact(h, of_weight.t(), gemms.grad_input),
        exact(h.t(), of_x.t(), gemms.grad_weight),
        (one[0] + other[0], one[1] + other[1]),
    )
    results = doubly(lambda x, weight: linear(x, weight, None, gemms), *FACTORS)
    for result, (value, size) in zip(results, expected, strict=True):
        assert ((result.double() - value).abs() <= size * 64 * 2.0**-23).all()


def test_emulated_bfloat16_rounds_the_second_derivative_once() -> None:
    low = [x.bfloat16() for x in FACTORS]
    with Emulated16("nearest", "infinity", "float32", 0).region():
        results = doubly(lambda x, weight: x @ weight.t(), *low)
    expected = doubly(lambda x, weight: x @ weight.t(), *(x.double() for x in low))
    for result, value in zip(results, expected, strict=True):
        assert result.dtype == torch.bfloat16
        assert (result.double() - value).norm() <= 2.0**-8 * value.norm()


def test_an_emulated_lstm_has_the_second_derivatives_of_float32() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 16)
    with Emulated16("nearest", "infinity", "float32", 0).region():
        low = second_of(copy.deepcopy(model).bfloat16(), normal(6, 3, 4).bfloat16())
    for x, exact in zip(low, second_of(model, normal(6, 3, 4)), strict=True):
        assert (x.float() - exact).norm() <= 0.03 * exact.norm()


def second_of(model: nn.Module, x: Tensor) -> list[Any]:
    """The gradients of a gradient penalty."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[0].float().sum(), x, create_graph=True)
    gradient.float().square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_functions_of_torch_func_give_what_autograd_gives() -> None:
    x, weight = FACTORS[:2]

    def one(weight: Tensor, x: Tensor) -> Tensor:
        return linear(x, weight, None, GEMMS["fp8_rowwise"]).tanh().sum()

    mapped = vmap(grad(one, argnums=1), in_dims=(None, 0))(weight, x)
    row = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(one(weight, row), row)
    torch.testing.assert_close(mapped, exact)
    second = hessian(one, argnums=1)(weight, x[0])
    assert second.shape == (32, 32)
    reverse = jacrev(jacrev(one, argnums=1), argnums=1)(weight, x[0])
    assert (second - reverse).norm() <= 0.1 * reverse.norm()  # they round other factors
