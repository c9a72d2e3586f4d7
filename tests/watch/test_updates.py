"""What a step adds, taken on a copy in float64: against formulas, and without a trace left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from mprun import optim
from mprun.precision.rounding import merge
from mprun.watch.updates import exact_updates, exact_weights

Make = Callable[[list[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "our sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, engine="eager"),
    "our adamw": lambda p: optim.AdamW(p, lr=0.1, engine="eager"),
    "our rmsprop": lambda p: optim.RMSprop(p, lr=0.1, engine="eager"),
    "our adamw, 16-bit moments": lambda p: optim.AdamW(
        p, lr=0.1, momentum_dtype=torch.float16, variance_dtype=torch.bfloat16, engine="eager"
    ),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in ((5, 3), (4,), ())]
    return [nn.Parameter(x.to(dtype)) for x in made]


def give_gradients(found: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in found:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@every_optimizer
def test_float32_steps_are_the_differences_but_for_what_storing_rounds_off(make: Make) -> None:
    found = parameters()
    optimizer = make(found)
    for step in range(4):
        give_gradients(found, step)
        updates = exact_updates(optimizer)
        before = [p.detach().clone() for p in found]
        optimizer.step()
        for p, old in zip(found, before, strict=True):
            assert torch.equal(updates[p].before, old.double())
            difference = p.detach().double() - old.double()
            # Half a unit of the weight (2^-24 of it), and float32 arithmetic in the formula: a
            # few units of the update.
            allowed = 2.0**-24 * p.detach().abs().double() + 2e-6 * difference.abs() + 1e-9
            assert ((updates[p].change - difference).abs() <= allowed).all()


def test_an_update_below_float32_s_resolution_is_seen() -> None:
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.full((1,), 3e-8)
    optimizer = torch.optim.SGD([p], lr=0.1)
    change = exact_updates(optimizer)[p].change
    assert change.item() == pytest.approx(-0.1 * float(torch.tensor(3e-8)), rel=1e-7)
    optimizer.step()
    assert p.item() == 1


@every_optimizer
def test_nothing_is_changed(make: Make) -> None:
    found = parameters()
    optimizer = make(found)
    give_gradients(found, 0)
    optimizer.step()
    give_gradients(found, 1)
    random = torch.get_rng_state()
    weights, gradients, state = copy.deepcopy(
        ([p.detach() for p in found], [p.grad for p in found], optimizer.state_dict())
    )
    exact_updates(optimizer)
    assert all(torch.equal(p, w) for p, w in zip(found, weights, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(found, gradients, strict=True))  # type: ignore[arg-type]
    assert_equal(optimizer.state_dict(), state)
    assert torch.equal(torch.get_rng_state(), random)


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_16_bit_weights_have_the_update_of_float32_ones(dtype: torch.dtype, rounding: str) -> None:
    low, wide = parameters(dtype), parameters(dtype)
    wide = [nn.Parameter(p.detach().float()) for p in wide]
    ours = optim.SGD(low, lr=1e-3, rounding=rounding, engine="eager")
    reference = torch.optim.SGD(wide, lr=1e-3)
    give_gradients(low, 0)
    for p, q in zip(low, wide, strict=True):
        assert p.grad is not None
        q.grad = p.grad.float()
    a, b = exact_updates(ours), exact_updates(reference)
    for p, q in zip(low, wide, strict=True):
        # Ours is taken in float32: half a unit of the weight.
        torch.testing.assert_close(a[p].change, b[q].change, rtol=0, atol=2.0**-22)


def test_kahan_s_remainder_belongs_to_the_weights() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = optim.SGD([p], lr=1e-3, rounding="kahan", engine="eager")
    for step in range(3):
        p.grad = torch.full((3,), 1.0, dtype=torch.bfloat16)
        update = exact_updates(optimizer)[p]
        assert update.before.tolist() == pytest.approx([1 - step * 1e-3] * 3, abs=1e-7)
        assert update.change.tolist() == pytest.approx([-1e-3] * 3, abs=1e-7)
        optimizer.step()
    exact = merge(p.detach(), optimizer.state[p]["remainder"]).double()
    assert torch.equal(exact_weights(p, optimizer), exact)


def test_scaled_gradients_are_divided_and_skipped_steps_have_no_update() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), 1024.0)
    for optimizer in (torch.optim.SGD([p], lr=0.5, fused=True), optim.SGD([p], lr=0.5)):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
        assert exact_updates(optimizer)[p].change.tolist() == [-0.5, -0.5]
        optimizer.found_inf = torch.tensor(1.0)
        assert exact_updates(optimizer) == {}


def test_parameters_without_a_gradient_have_no_update() -> None:
    found = parameters()
    optimizer = torch.optim.AdamW(found)
    give_gradients(found[:1], 0)
    assert set(exact_updates(optimizer)) == set(found[:1])


def test_sparse_gradients() -> None:
    layer = nn.Embedding(5, 2, sparse=True)
    layer(torch.tensor([1, 3])).sum().backward()
    change = exact_updates(torch.optim.SGD(layer.parameters(), lr=0.5))[layer.weight].change
    assert change[:, 0].tolist() == [0, -0.5, 0, -0.5, 0]
