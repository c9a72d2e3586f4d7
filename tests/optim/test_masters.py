"""Float32 masters against a hand-written loop, and their state, groups, scales and statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.optim import MasterWeights, float32_masters, name_parameters
from mprun.precision.loss_scale import (
    Clip,
    DynamicLossScale,
    DynamicRule,
    StaticLossScale,
    step_scaled,
)
from mprun.watch.memory_recorder import memory

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    (torch.optim.Adam, {"lr": 1e-3}),
    (torch.optim.Adafactor, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
]


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    name_parameters(model)
    return model


def wrapped(model: nn.Module, kind: Any, options: dict[str, Any], **how: Any) -> MasterWeights:
    with float32_masters(model) as masters:
        inner = kind(model.parameters(), **options)
    return MasterWeights(inner, masters, **how)


def backward(model: nn.Module, step: int, factor: float = 1.0) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    dtype = next(model.parameters()).dtype
    (model(x.to(dtype)).float().square().mean() * factor).backward()


def bits(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("kind", "options"), CLASSES)
def test_it_is_hand_written_training_with_float32_masters(
    kind: Any, options: dict[str, Any]
) -> None:
    model, oracle = network(), network()
    optimizer = wrapped(model, kind, options, rounding="nearest")
    masters = [nn.Parameter(p.detach().float()) for p in oracle.parameters()]
    by_hand = kind(masters, **options)
    for step in range(6):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        oracle.zero_grad()
        backward(oracle, step)
        for master, p in zip(masters, oracle.parameters(), strict=True):
            master.grad = p.grad.float()
        by_hand.step()
        with torch.no_grad():
            for master, p in zip(masters, oracle.parameters(), strict=True):
                p.copy_(master.bfloat16())
    assert same(bits(model), bits(oracle))
    assert not same(bits(model), bits(network()))
    assert same([optimizer.state[p]["master"] for p in model.parameters()], [*masters])


def test_stochastic_rounding_is_right_on_average_and_repeats() -> None:
    def run(seed: int) -> Tensor:
        model = nn.Linear(4096, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        name_parameters(model)
        optimizer = wrapped(model, torch.optim.SGD, {"lr": 1.0}, seed=seed)
        model.weight.grad = torch.full_like(model.weight, -1 / 512)
        optimizer.step()
        assert optimizer.state[model.weight]["master"].unique().tolist() == [1 + 1 / 512]
        return model.weight.detach()

    weights = run(0)
    assert sorted(weights.float().unique().tolist()) == [1.0, 1.0078125]
    share = (weights > 1).float().mean().item()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 4096) ** 0.5
    assert torch.equal(weights, run(0))
    assert not torch.equal(weights, run(1))


def test_a_state_with_fewer_masters_is_refused() -> None:
    """`tests/precision/test_own_loops.py` resumes in every mode, bit for bit."""
    optimizer = wrapped(network(), torch.optim.SGD, {"lr": 0.1})
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="3 masters for 4 parameters"):
        optimizer.load_state_dict({**state, "masters": state["masters"][:3]})


def test_a_schedule_reaches_the_inner_optimizer() -> None:
    model = network()
    optimizer = wrapped(model, torch.optim.SGD, {"lr": 1.0})
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        seen.append(optimizer.inner.param_groups[0]["lr"])
        schedule.step()
    assert seen == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("early", [False, True])
def test_loss_scale_clipping_and_skipped_steps(early: bool) -> None:
    device = torch.device("cpu")
    scaled, plain = network(torch.float16), network(torch.float16)
    a = wrapped(scaled, torch.optim.Adagrad, {"lr": 0.1}, rounding="nearest")
    b = wrapped(plain, torch.optim.Adagrad, {"lr": 0.1}, rounding="nearest")
    scale = StaticLossScale(8.0, device)
    for step in range(3):
        a.zero_grad()
        b.zero_grad()
        backward(scaled, step, 8.0)
        backward(plain, step)
        if early:
            scale.unscale(a)
        assert scale.step(a, Clip(0.1)) == 0
        scale.update()
        step_scaled(b, None, Clip(0.1))
    for x, y in zip(bits(scaled), bits(plain), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=1e-4)
    before, state = bits(scaled), copy.deepcopy(a.state_dict()["masters"])
    dynamic = DynamicLossScale(16.0, DynamicRule(), device)
    a.zero_grad()
    backward(scaled, 9, float("inf"))
    if early:
        dynamic.unscale(a)
    assert dynamic.step(a, Clip()) == 1
    dynamic.update()
    assert dynamic.tensor == 8
    assert same(before, bits(scaled))
    assert same(state, a.state_dict()["masters"])


def test_gradients_are_unscaled_in_float32() -> None:
    """float16's smallest number, divided by a loss scale of 4, is 0 in float16."""
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.zeros_(model.weight)
    optimizer = wrapped(model, torch.optim.SGD, {"lr": 1.0}, rounding="nearest")
    model.weight.grad = torch.full_like(model.weight, 2.0**-24)
    step_scaled(optimizer, torch.tensor(4.0), Clip())
    (master,) = optimizer.state_dict()["masters"]
    assert master.item() == -(2.0**-26)


def test_float32_parameters_have_no_master_and_are_unscaled_too() -> None:
    model = network()
    model[2].float()
    model[2].register_forward_pre_hook(lambda _, x: x[0].float())
    optimizer = wrapped(model, torch.optim.SGD, {"lr": 1.0}, rounding="nearest")
    before = model[2].bias.detach().clone()
    backward(model, 0, 4.0)
    gradient = model[2].bias.grad.clone()
    step_scaled(optimizer, torch.tensor(4.0), Clip())
    torch.testing.assert_close(model[2].bias.detach(), before - gradient / 4, rtol=0, atol=0)
    assert torch.equal(model[2].bias.grad, gradient)
    assert "master" not in optimizer.state[model[2].bias]
    assert len(optimizer.state_dict()["masters"]) == 2


def test_tied_frozen_and_unused_parameters() -> None:
    model = network()
    model.append(nn.Linear(6, 5).bfloat16())  # its weight is the first one's
    model[3].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    with float32_masters(model) as masters:
        assert model[3].weight is model[0].weight
        inner = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad])
    assert len(masters) == 4
    assert model[0].weight.dtype == torch.bfloat16
    optimizer = MasterWeights(inner, masters)
    unused = model[3].bias.detach().clone()
    backward(model[:3], 0)
    optimizer.step()
    assert torch.equal(model[3].bias, unused)


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Embedding(5, 2, sparse=True).bfloat16()
    optimizer = wrapped(model, torch.optim.Adagrad, {"lr": 0.1})
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="Adagrad does not take sparse gradients"):
        optimizer.step()


def test_masters_are_counted_as_optimizer_state() -> None:
    model = network()
    optimizer = wrapped(model, torch.optim.Adagrad, {"lr": 0.1})
    count = sum(p.numel() for p in model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()

    measured = memory(step, model, optimizer)
    assert measured.totals["parameters"] == 2 * count
    assert measured.totals["optimizer_state"] == 8 * count + 4 * 4  # with four step counts
