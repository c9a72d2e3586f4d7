"""Gradient hooks and attributes of a model's parameters outlive the conversion to a mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mprun.precision.layers import convert
from tests.each import each

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@each("dtype", DTYPES)
def test_a_hook_changes_the_gradient(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 1)
    handle = model.weight.register_hook(lambda gradient: gradient * 0)
    convert(model, CPU, dtype)
    assert not _gradient(model, dtype).any()
    handle.remove()
    assert _gradient(model, dtype).all()


@each("dtype", DTYPES)
def test_a_hook_after_accumulation_gets_the_converted_parameter(dtype: torch.dtype) -> None:
    model, seen = nn.Linear(4, 1), list[Tensor]()
    model.weight.register_post_accumulate_grad_hook(seen.append)
    convert(model, CPU, dtype)
    _gradient(model, dtype)
    assert len(seen) == 1
    assert seen[0] is model.weight


def test_attributes_ties_and_frozen_parameters_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].weight.no_decay = True  # type: ignore[assignment]
    model[1].bias.requires_grad_(False)
    convert(model, CPU, torch.bfloat16)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False]
    assert model[1].weight is model[0].weight
    assert model[0].weight.no_decay


def _gradient(model: nn.Module, dtype: torch.dtype) -> Tensor:
    model.zero_grad()
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    gradient = model.get_parameter("weight").grad
    assert gradient is not None
    assert gradient.dtype == dtype
    return gradient
