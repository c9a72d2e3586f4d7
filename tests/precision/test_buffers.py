"""BatchNorm's running statistics under overflows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mprun.precision import (
    AutocastCaster,
    DynamicLossScale,
    DynamicRule,
    NativeArithmetic,
    NoClip,
    Precision,
)
from tests.precision.test_policy import policy

CPU = torch.device("cpu")


def step(model: nn.Module, x: Tensor, loss_factor: float = 1.0) -> Tensor:
    loss_scale = DynamicLossScale(2.0**4, DynamicRule(), CPU)
    precision = Precision(
        policy("fp16_mixed"),
        AutocastCaster("cpu", torch.float16),
        NativeArithmetic(),
        loss_scale,
        NoClip(),
    )
    precision.prepare(model, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.begin_step(1)
    precision.backward(precision.forward(model, x).sum() * loss_factor)
    skipped = precision.step(optimizer)
    assert skipped is not None
    return skipped


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_an_overflow_in_the_forward_pass_leaves_finite_statistics() -> None:
    model = net()
    before = model[1].running_mean.clone()
    assert step(model, torch.full((8, 4), 1e6)) == 1
    assert torch.isfinite(model[1].running_mean).all()
    assert torch.equal(model[1].running_mean, before)


def test_an_overflow_in_the_backward_pass_alone_keeps_the_updated_statistics() -> None:
    model = net()
    before = model[1].running_mean.clone()
    assert step(model, torch.randn(8, 4), loss_factor=1e30) == 1
    assert torch.isfinite(model[1].running_mean).all()
    assert not torch.equal(model[1].running_mean, before)


def test_a_step_that_is_taken_keeps_its_statistics() -> None:
    model = net()
    before = model[1].running_mean.clone()
    assert step(model, torch.randn(8, 4)) == 0
    assert not torch.equal(model[1].running_mean, before)


def test_integer_buffers_are_left_alone() -> None:
    model = net()
    step(model, torch.full((8, 4), 1e6))
    assert model[1].num_batches_tracked == pytest.approx(1)
