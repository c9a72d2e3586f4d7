"""Precision at work: dtypes of forward, loss and gradients, conversion, clipping."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from mprun.precision import (
    AutocastCaster,
    ClipNorm,
    Emulated16,
    NativeArithmetic,
    NoCaster,
    NoClip,
    NoLossScale,
    Policy,
    Precision,
)
from mprun.precision.convert import convert
from tests.precision.test_policy import policy

CPU = torch.device("cpu")


def precision(name: str, **changes: object) -> Precision:
    row: Policy = replace(policy(name), **changes)  # type: ignore[arg-type]
    caster = AutocastCaster("cpu", torch.bfloat16) if row.casting == "autocast" else NoCaster()
    return Precision(row, caster, NativeArithmetic(), NoLossScale(), NoClip())


class Spy(nn.Module):
    """A layer that remembers the dtype of its raw output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.seen = out.dtype
        return out


@pytest.mark.parametrize(
    ("name", "inside"), [("fp32", torch.float32), ("bf16_mixed", torch.bfloat16)]
)
def test_computes_in_the_compute_dtype_and_gives_float32_out(
    name: str, inside: torch.dtype
) -> None:
    ours, model = precision(name), Spy()
    ours.prepare(model, CPU)
    output = ours.forward(model, torch.randn(2, 4))
    assert model.seen == inside
    assert output.dtype == torch.float32
    ours.backward(output.sum())
    assert model.layer.weight.dtype == torch.float32
    assert model.layer.weight.grad is not None
    assert model.layer.weight.grad.dtype == torch.float32


def test_output_dtype_can_be_left_as_computed() -> None:
    ours, model = precision("bf16_mixed", output_dtype="bfloat16"), Spy()
    assert ours.forward(model, torch.randn(2, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("overflow", ["infinity", "saturate"])
def test_a_16_bit_output_and_its_loss_are_emulated(overflow: str) -> None:
    """Told by saturation, which native kernels do not have."""
    row = replace(policy("fp16_mixed"), output_dtype="float16", overflow=overflow)
    arithmetic = Emulated16("nearest", overflow, "float32", seed=0)
    ours = Precision(row, AutocastCaster("cpu", torch.float16), arithmetic, NoLossScale(), NoClip())
    largest = 65504.0 if overflow == "saturate" else torch.inf

    output = ours.forward(nn.Identity(), torch.tensor([1e6, 1.0]))
    assert output.dtype == torch.float16
    assert output.tolist() == [largest, 1.0]

    output, target = torch.full((2,), 300.0).half(), torch.zeros(2).half()
    loss = ours.loss(nn.functional.mse_loss, output, target)
    assert loss.dtype == torch.float16
    assert loss.item() == largest
    assert ours.loss(nn.functional.mse_loss, output / 300, target, share=0.5).item() == 0.5


def test_a_16_bit_loss_is_rounded_stochastically_in_training() -> None:
    row = replace(policy("half_sr_full"), output_dtype="float16")
    arithmetic = Emulated16("stochastic", "infinity", "float32", seed=0)
    ours = Precision(row, NoCaster(), arithmetic, NoLossScale(), NoClip())
    output, target = torch.full((1,), 1.0).half(), torch.zeros(1).half()
    found = []
    for step in range(64):
        ours.begin_step(step)
        found.append(ours.loss(nn.functional.mse_loss, output, target, share=1 / 3).item())
    third = torch.tensor(1 / 3).half()
    assert set(found) == {third.item(), torch.nextafter(third, torch.ones(()).half()).item()}


def test_casting_ends_with_the_forward_pass() -> None:
    ours, model = precision("bf16_mixed"), Spy()
    ours.forward(model, torch.randn(2, 4))
    assert not torch.is_autocast_enabled("cpu")


def test_convert_keeps_tied_parameters_tied_and_integers_integer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    convert(model, CPU, torch.float16)
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == torch.float16
    assert model[2].running_mean.dtype == torch.float16
    assert model[2].num_batches_tracked.dtype == torch.int64
    assert sum(1 for _ in model.parameters()) == 5


class TwoNames(nn.Module):
    """One weight and one buffer, each under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Parameter(torch.randn(3, 3))
        self.decode = self.encode
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("inverse", self.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_convert_keeps_two_names_of_one_tensor_in_a_module(dtype: torch.dtype) -> None:
    model = convert(TwoNames(), CPU, dtype)
    assert model.decode is model.encode
    assert model.inverse is model.scale
    assert model.encode.dtype == model.scale.dtype == dtype
    assert sum(1 for _ in model.parameters()) == 1


def test_convert_keeps_values_and_sets_the_memory_format() -> None:
    model = nn.Conv2d(3, 4, 3)
    before = model.weight.detach().clone()
    convert(model, CPU, torch.float32, torch.channels_last)
    assert torch.equal(model.weight, before)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_clip_norm_equals_the_definition() -> None:
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    weights[0].grad, weights[1].grad = torch.tensor([2.0, 0, 0]), torch.tensor([0, 1.0])
    ClipNorm(0.5)(torch.optim.SGD(weights, lr=1.0))
    # The global norm is sqrt(5); clip_grad_norm_ divides by norm + 1e-6.
    factor = 0.5 / (5**0.5 + 1e-6)
    assert weights[0].grad.tolist() == pytest.approx([2 * factor, 0, 0], rel=1e-6)
    assert weights[1].grad.tolist() == pytest.approx([0, factor], rel=1e-6)
