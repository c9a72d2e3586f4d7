"""Precision at work: dtypes of forward, loss and gradients, conversion, clipping."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from mprun.precision import (
    AutocastCaster,
    DynamicLossScale,
    DynamicRule,
    Emulated16,
    NoCaster,
    OpListCaster,
    Policy,
    Precision,
    op_lists,
)
from mprun.precision.apply import NOT_SCALED
from mprun.precision.layers import convert
from tests.each import each
from tests.precision.test_policy import policy

CPU = torch.device("cpu")


def precision(name: str, **changes: object) -> Precision:
    row: Policy = replace(policy(name), **changes)  # type: ignore[arg-type]
    caster = AutocastCaster("cpu", torch.bfloat16) if row.casting == "autocast" else NoCaster()
    return Precision(row, device=CPU, execution="native", loss_scale="none", op_lists=caster)


@each("overflow", ["infinity", "saturate"])
def test_a_16_bit_output_and_its_loss_are_emulated(overflow: str) -> None:
    """Told by saturation, which native kernels do not have."""
    row = replace(policy("fp16_mixed"), output_dtype="float16", overflow=overflow)
    arithmetic = Emulated16("nearest", overflow, "float32", seed=0)
    ours = Precision(row, device=CPU, execution=arithmetic, loss_scale="none")
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
    ours = Precision(row, device=CPU, execution=arithmetic, loss_scale="none")
    output, target = torch.full((1,), 1.0).half(), torch.zeros(1).half()
    found = []
    for step in range(64):
        ours.begin_step(step)
        found.append(ours.loss(nn.functional.mse_loss, output, target, share=1 / 3).item())
    third = torch.tensor(1 / 3).half()
    assert set(found) == {third.item(), torch.nextafter(third, torch.ones(()).half()).item()}


def test_convert_keeps_tied_parameters_tied_and_integers_integer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    convert(model, CPU, torch.float16)
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == torch.float16
    assert model[2].weight.dtype == torch.float16
    assert model[2].running_mean.dtype == model[2].running_var.dtype == torch.float32
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


@each("dtype", [torch.float32, torch.float16])
def test_convert_keeps_two_names_of_one_tensor_in_a_module(dtype: torch.dtype) -> None:
    model = convert(TwoNames(), CPU, dtype)
    assert model.decode is model.encode
    assert model.inverse is model.scale
    assert model.encode.dtype == model.scale.dtype == dtype
    assert sum(1 for _ in model.parameters()) == 1


@each("memory_format", [torch.channels_last, torch.contiguous_format])
def test_images_of_one_channel_go_through_the_model_in_the_memory_format(
    memory_format: torch.memory_format,
) -> None:
    """Such an image is in both formats, so the weights decide, by their strides."""
    model, image = nn.Conv2d(1, 4, 3), torch.rand(2, 1, 8, 8)
    convert(model, CPU, torch.float32, memory_format)
    output = model(image.contiguous(memory_format=memory_format))
    assert output.is_contiguous(memory_format=memory_format)
    assert (output.stride()[1] == 1) == (memory_format == torch.channels_last)


# ---- outputs of any structure ----


def test_a_model_gets_the_arguments_it_is_given() -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    ours = precision("bf16_mixed")
    ours.prepare(model, CPU)
    x = torch.randn(2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected, weights = model(x, x, value=x, average_attn_weights=False)
    output, seen = ours.forward(model, x, x, value=x, average_attn_weights=False)
    assert torch.equal(output, expected.float())
    assert torch.equal(seen, weights.float())


# ---- backward twice, gradients of gradients ----


CASTERS = {
    "none": NoCaster(),
    "autocast": AutocastCaster("cpu", torch.bfloat16),
    "op lists": OpListCaster(op_lists(["linear"], [], []), torch.bfloat16),
}


@each("name", CASTERS)
def test_a_graph_can_be_retained_and_differentiated(name: str) -> None:
    mode = "fp32" if name == "none" else "bf16_mixed"
    ours = Precision(mode, device=CPU, execution="native", loss_scale=4.0, op_lists=CASTERS[name])
    x = torch.tensor([[3.0]], requires_grad=True)
    loss = ours.forward(lambda x: (x**3).sum(), x)  # type: ignore[arg-type]
    ours.backward(loss, retain_graph=True)
    assert x.grad is not None
    assert x.grad.item() == 4 * 27
    x.grad = None
    ours.backward(loss, create_graph=True)
    (second,) = torch.autograd.grad(x.grad.sum(), x)
    assert second.item() == 4 * 18
    ours.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        ours.backward(loss)


@pytest.mark.filterwarnings("ignore:precision=bf16_mixed is emulated")
@pytest.mark.parametrize(
    ("mode", "warned"), [("half_sr", [1]), ("fp16_mixed", [1]), ("bf16_mixed", [])]
)
def test_a_loss_that_was_not_scaled_is_warned_of_once(mode: str, warned: list[int]) -> None:
    model = nn.Linear(2, 1)
    ours = Precision(mode, device=CPU)
    ours.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(backward: Callable[[torch.Tensor], None] | None) -> bool:
        ours.begin_step()
        if backward is not None:
            backward(ours.forward(model, torch.ones(4, 2)).sum())
        with warnings.catch_warnings(record=True) as seen:
            ours.step(optimizer)
        ours.update()
        return any(str(x.message) == NOT_SCALED for x in seen)

    loops = [None, torch.Tensor.backward, torch.Tensor.backward, ours.backward]
    assert [n for n, backward in enumerate(loops) if step(backward)] == warned


# ---- several models and optimizers ----


def test_an_iteration_that_was_not_ended_ends_with_the_next() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scale = DynamicLossScale(8.0, DynamicRule(interval=1), CPU)
    ours = Precision("fp16_mixed", device=CPU, execution="native", loss_scale=scale)
    for step in range(1, 4):
        optimizer.zero_grad()
        ours.begin_step(step)
        ours.backward(weight.sum())
        ours.step(optimizer)
        assert weight.item() == -step
    assert scale.tensor.item() == 32.0
    with pytest.raises(RuntimeError, match=r"without update\(\)"):
        ours.step(optimizer)
