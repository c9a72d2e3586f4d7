"""Loss scales against torch.amp.GradScaler: the walk of the scale, the bits of the gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from mprun.optim import SGD, AdamW
from mprun.precision import (
    Clip,
    DynamicLossScale,
    DynamicRule,
    LossScale,
    StaticLossScale,
)
from mprun.precision.loss_scale import STATIC_PATIENCE, next_state
from tests.each import each

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


@settings(max_examples=5)
@example(initial=2.0**120, growth=4.0, backoff=0.5, interval=1, rate=0.02, seed=0)
@example(initial=1e-30, growth=1.1, backoff=0.25, interval=3, rate=0.3, seed=1)
@example(initial=1024.0, growth=2.0, backoff=0.9, interval=50, rate=0.0, seed=2)
@given(
    initial=st.sampled_from([1.0, 1024.0, 2.0**16, 2.0**120, 3.3, 1e-30]),
    growth=st.sampled_from([2.0, 1.5, 1.1, 4.0]),
    backoff=st.sampled_from([0.5, 0.25, 0.9]),
    interval=st.sampled_from([1, 2, 3, 7, 50]),
    rate=st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_long_walks_equal_grad_scalers(
    initial: float, growth: float, backoff: float, interval: int, rate: float, seed: int
) -> None:
    """Growth, back-off and the ceiling (a scale that would become infinite stays)."""
    generator = torch.Generator().manual_seed(seed)
    overflows = (torch.rand(400, generator=generator) < rate).tolist()
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


def gradients(loss_scale: LossScale, clip: Clip | None = None) -> list[torch.Tensor]:
    """What the optimizer sees, by an SGD step of rate 1 from known weights."""
    model, x = model_and_data()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_scale.scale(model(x).square().mean()).backward()
    loss_scale.step(optimizer, clip or Clip())
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


@each("scale", [2.0**-10, 1.0, 1024.0, 2.0**16])
def test_a_power_of_two_changes_no_bit_of_the_gradients(scale: float) -> None:
    plain = gradients(LossScale())
    for scaled in (StaticLossScale(scale, CPU), DynamicLossScale(scale, DynamicRule(), CPU)):
        for a, b in zip(plain, gradients(scaled), strict=True):
            assert torch.equal(a, b)


@each("planted", [math.inf, -math.inf, math.nan])
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
        skipped = loss_scale.step(optimizer, Clip())
        loss_scale.update()
        assert skipped is not None
        assert skipped.item() == 1
        assert loss_scale.tensor.item() == after
        for a, b in zip(before, model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_run_ends_at_the_floor_and_after_many_skips_in_a_row() -> None:
    dynamic = DynamicLossScale(1.0, DynamicRule(floor=0.5), CPU)
    assert dynamic.failure_reason(1.0, 5) is None
    assert "fell to its floor, 0.5" in str(dynamic.failure_reason(0.5, 6))
    assert dynamic.failure_reason(0.5, 0) is None
    static = StaticLossScale(1024.0, CPU)
    assert static.failure_reason(1024.0, STATIC_PATIENCE - 1) is None
    assert "loss_scale=dynamic" in str(static.failure_reason(1024.0, STATIC_PATIENCE))
    assert LossScale().failure_reason(1.0, 10**6) is None


# ---- several optimizers, unscale apart from step: as GradScaler does ----


@each("unscales", [False, True])
def test_two_optimizers_equal_grad_scalers_bit_for_bit(unscales: bool) -> None:
    """100 iterations with overflows of the one, the other and both; the second one clipped."""
    draws = torch.rand(100, 2, generator=torch.Generator().manual_seed(0)) < 0.1
    ends = []
    for ours in (True, False):
        torch.manual_seed(0)
        models = [nn.Linear(3, 2), nn.Linear(2, 1)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in models]
        scale = DynamicLossScale(2.0**10, DynamicRule(interval=5, floor=NO_FLOOR), CPU)
        scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=5)
        for overflows in draws.tolist():
            loss = models[1](models[0](torch.randn(4, 3)).tanh()).square().mean()
            (scale if ours else scaler).scale(loss).backward()
            for n, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if overflows[n]:
                    model.weight.grad[0, 0] = math.inf
                if unscales and n:
                    (scale.unscale if ours else scaler.unscale_)(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scale.step(optimizer, Clip()) if ours else scaler.step(optimizer)
                optimizer.zero_grad()
            (scale if ours else scaler).update()
        end = scale.tensor.item() if ours else scaler.get_scale()
        ends.append((end, [p.detach() for m in models for p in m.parameters()]))
    assert ends[0][0] == ends[1][0] != 2.0**10
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


def half_weight(*scaled_gradient: float) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(len(scaled_gradient), dtype=torch.float16))
    weight.grad = torch.tensor(scaled_gradient, dtype=torch.float16)
    return weight


def test_float16_gradients_are_unscaled_in_float32_until_update() -> None:
    """2^-12 over 2^16 is 3.7e-9: float16 would make it 0, and GradScaler refuses."""
    weight = half_weight(2.0**-12, 3.0)
    optimizer = SGD([weight], lr=1.0)
    loss_scale = DynamicLossScale(2.0**16, DynamicRule(), CPU)
    loss_scale.unscale(optimizer)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.tolist() == [2.0**-28, 3.0 * 2.0**-16]
    loss_scale.step(optimizer, Clip())
    loss_scale.update()
    assert weight.grad.dtype == weight.grad_dtype == torch.float16
    optimizer.zero_grad()
    (weight.sum() * 2).backward()
    assert weight.grad.dtype == torch.float16


@each("overflow", [False, True])
def test_unscale_and_step_are_step_in_every_bit(overflow: bool) -> None:
    ends = []
    for apart in (False, True):
        (weight,) = (half_weight(*torch.randn(50, generator=torch.manual_seed(1)).tolist()),)
        optimizer = AdamW([weight], lr=0.1)
        loss_scale = DynamicLossScale(1024.0, DynamicRule(), CPU)
        for _ in range(3):
            if overflow:
                weight.grad[3] = math.inf  # type: ignore[index]
            if apart:
                loss_scale.unscale(optimizer)
            skipped = loss_scale.step(optimizer, Clip())
            assert skipped is not None
            assert skipped.item() == overflow
            loss_scale.update()
            weight.grad = torch.randn(50, generator=torch.manual_seed(2)).half()
        attempts = optimizer.param_groups[0]["attempts"]
        ends.append((weight.detach().clone(), loss_scale.tensor.item(), attempts))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:] == (1024.0 * (0.125 if overflow else 1), 3)


@each("by_hand", [False, True])
def test_float16_gradients_are_clipped_by_their_true_norm(by_hand: bool) -> None:
    """Scaled, their squares overflow float16; the norm of 100 gradients of 1 is 10."""
    weight = half_weight(*[1024.0] * 100)
    optimizer = SGD([weight], lr=1.0, rounding="nearest")
    loss_scale = StaticLossScale(1024.0, CPU)
    loss_scale.unscale(optimizer)
    if by_hand:
        assert nn.utils.clip_grad_norm_([weight], 1.0).item() == 10.0
    loss_scale.step(optimizer, Clip() if by_hand else Clip(1.0))
    # 1/10, but for the 1e-6 that clip_grad_norm_ adds and half a unit of float16 at 0.1.
    torch.testing.assert_close(weight.detach().float(), torch.full((100,), -0.1), rtol=0, atol=4e-5)


@each("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_pytorchs_optimizers_step_on_float16_parameters(kind: type[torch.optim.Optimizer]) -> None:
    """They get the clipped gradients in the parameters' dtype again."""
    weight = half_weight(*[1024.0] * 100)
    optimizer = kind([weight], lr=0.5)  # type: ignore[call-arg]
    loss_scale = StaticLossScale(1024.0, CPU)
    loss_scale.unscale(optimizer)
    nn.utils.clip_grad_norm_([weight], 1.0)
    loss_scale.step(optimizer, Clip())
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float16
    assert (weight < 0).all()


def test_what_is_done_twice_is_an_error_that_names_the_remedy() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for loss_scale in (StaticLossScale(8.0, CPU), DynamicLossScale(8.0, DynamicRule(), CPU)):
        loss_scale.scale(weight.sum()).backward()
        loss_scale.unscale(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale\(SGD\) twice.*update\(\) once"):
            loss_scale.unscale(optimizer)
        loss_scale.step(optimizer, Clip())
        with pytest.raises(RuntimeError, match=r"step\(SGD\) twice without update\(\)"):
            loss_scale.step(optimizer, Clip())
        with pytest.raises(RuntimeError, match="after its step"):
            loss_scale.unscale(optimizer)
        loss_scale.update()
        loss_scale.update()  # nothing has stepped: nothing moves
        assert loss_scale.tensor.item() == 8.0
        loss_scale.unscale(optimizer)
        loss_scale.load_state_dict(loss_scale.state_dict())  # begins a new iteration
        loss_scale.step(optimizer, Clip())


@each("dtype", [torch.float32, torch.float16])
def test_sparse_gradients_are_unscaled_as_grad_scaler_does(dtype: torch.dtype) -> None:
    """A row met twice is summed before it is judged; torch.optim.SGD takes such gradients."""
    table = nn.Embedding(4, 2, sparse=True).to(dtype)
    before = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    loss_scale = StaticLossScale(1024.0, CPU)
    loss_scale.scale(table(torch.tensor([1, 1, 3])).float().sum()).backward()
    skipped = loss_scale.step(optimizer, Clip())
    assert skipped is not None
    assert skipped.item() == 0
    step = (before - table.weight.detach()).float()
    expected = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0]])
    torch.testing.assert_close(step, expected, rtol=0, atol=1e-6 if dtype.itemsize == 4 else 2e-3)
