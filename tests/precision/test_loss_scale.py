"""Loss scales against torch.amp.GradScaler: the walk of the scale, the bits of the gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mprun.precision import (
    ClipNorm,
    DynamicLossScale,
    DynamicRule,
    LossScale,
    NoClip,
    NoLossScale,
    StaticLossScale,
)
from mprun.precision.loss_scale import STATIC_PATIENCE, next_state

CPU = torch.device("cpu")
NO_FLOOR = 0.0


def walk(rule: DynamicRule, initial: float, overflows: list[bool]) -> list[float]:
    scale, tracker = torch.tensor(initial), torch.tensor(0, dtype=torch.int32)
    found = []
    for overflow in overflows:
        scale, tracker = next_state(scale, tracker, torch.tensor(float(overflow)), rule)
        found.append(scale.item())
    return found


def grad_scalers_walk(rule: DynamicRule, initial: float, overflows: list[bool]) -> list[float]:
    """The oracle: a real GradScaler on a real parameter, with a planted gradient."""
    scaler = torch.amp.GradScaler("cpu", initial, rule.growth, rule.backoff, rule.interval)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    found = []
    for overflow in overflows:
        scaler.scale(torch.zeros(1))
        weight.grad = torch.tensor([math.inf if overflow else 1.0])
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


@settings(max_examples=30, deadline=None)
@given(
    initial=st.sampled_from([1.0, 1024.0, 2.0**16, 2.0**120, 3.3, 1e-30]),
    growth=st.sampled_from([2.0, 1.5, 1.1, 4.0]),
    backoff=st.sampled_from([0.5, 0.25, 0.9]),
    interval=st.sampled_from([1, 2, 3, 7, 50]),
    rate=st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_thousand_step_walks_equal_grad_scalers(
    initial: float, growth: float, backoff: float, interval: int, rate: float, seed: int
) -> None:
    """Growth, back-off and the ceiling (a scale that would become infinite stays)."""
    generator = torch.Generator().manual_seed(seed)
    overflows = (torch.rand(1000, generator=generator) < rate).tolist()
    rule = DynamicRule(growth, backoff, interval, NO_FLOOR)
    assert walk(rule, initial, overflows) == grad_scalers_walk(rule, initial, overflows)


@given(floor=st.sampled_from([2.0**-14, 1.0, 64.0]), steps=st.integers(1, 60))
def test_the_scale_never_falls_below_its_floor_and_grows_from_there(
    floor: float, steps: int
) -> None:
    rule = DynamicRule(interval=1, floor=floor)
    found = walk(rule, 2.0**16, [True] * steps)
    assert found == [max(2.0 ** (16 - n), floor) for n in range(1, steps + 1)]
    assert walk(rule, floor, [False]) == [2 * floor]


def model_and_data() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), torch.randn(4, 3)


def gradients(loss_scale: LossScale, clip: NoClip | ClipNorm | None = None) -> list[torch.Tensor]:
    """What the optimizer sees, by an SGD step of rate 1 from known weights."""
    model, x = model_and_data()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_scale.scale(model(x).square().mean()).backward()
    loss_scale.step(optimizer, clip or NoClip())
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 1024.0, 2.0**16])
def test_a_power_of_two_changes_no_bit_of_the_gradients(scale: float) -> None:
    plain = gradients(NoLossScale())
    for scaled in (StaticLossScale(scale, CPU), DynamicLossScale(scale, DynamicRule(), CPU)):
        for a, b in zip(plain, gradients(scaled), strict=True):
            assert torch.equal(a, b)


def test_clipping_sees_unscaled_gradients() -> None:
    plain = gradients(NoLossScale(), ClipNorm(0.1))
    scaled = gradients(StaticLossScale(1024.0, CPU), ClipNorm(0.1))
    for a, b in zip(plain, scaled, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("planted", [math.inf, -math.inf, math.nan])
def test_an_overflow_skips_the_step_and_nothing_else(planted: float) -> None:
    for loss_scale, after in (
        (StaticLossScale(1024.0, CPU), 1024.0),
        (DynamicLossScale(1024.0, DynamicRule(), CPU), 512.0),
    ):
        model, x = model_and_data()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss_scale.scale(model(x).sum()).backward()
        weight = next(model.parameters())
        assert weight.grad is not None
        weight.grad[0, 0] = planted
        skipped = loss_scale.step(optimizer, NoClip())
        assert skipped is not None
        assert skipped.item() == 1
        assert loss_scale.tensor.item() == after
        for a, b in zip(before, model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_trouble_is_told_at_the_floor_and_after_many_skips() -> None:
    dynamic = DynamicLossScale(1.0, DynamicRule(floor=0.5), CPU)
    assert dynamic.trouble(1.0, 5) is None
    assert "fell to its floor, 0.5" in str(dynamic.trouble(0.5, 6))
    assert dynamic.trouble(0.5, 0) is None
    static = StaticLossScale(1024.0, CPU)
    assert static.trouble(1024.0, STATIC_PATIENCE - 1) is None
    assert "loss_scale=dynamic" in str(static.trouble(1024.0, STATIC_PATIENCE))
    assert NoLossScale().trouble(1.0, 10**6) is None


def test_state_goes_round() -> None:
    rule = DynamicRule(interval=3)
    a, b = (DynamicLossScale(s, rule, CPU) for s in (8.0, 1.0))
    a._tracker = torch.tensor(2, dtype=torch.int32)
    b.load_state_dict(a.state_dict())
    no_overflow = torch.tensor(0.0)
    assert next_state(b.tensor, b._tracker, no_overflow, rule)[0].item() == 16.0
