"""The optimizer of a policy: PyTorch's own, its namesake in mprun, or float32 masters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from mprun import optim
from mprun.optim import MasterWeights, for_policy
from mprun.precision import Precision
from mprun.precision.policy import policy


def prepared(mode: str) -> nn.Module:
    torch.manual_seed(0)
    return Precision(mode, device="cpu", execution="native").prepare(nn.Linear(8, 4))


def step(optimizer: Optimizer, model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()


@pytest.mark.parametrize(
    ("mode", "kind", "expected"),
    [
        ("fp32", torch.optim.AdamW, torch.optim.AdamW),
        ("bf16_mixed", torch.optim.SGD, torch.optim.SGD),
        ("fp16_mixed", torch.optim.Adagrad, torch.optim.Adagrad),
        ("bf16_sr", torch.optim.AdamW, optim.AdamW),
        ("half_sr", torch.optim.SGD, optim.SGD),
        ("bf16_true", torch.optim.RMSprop, optim.RMSprop),
        ("bf16_sr", torch.optim.Adam, MasterWeights),
    ],
)
def test_what_is_stored_decides_the_class(mode: str, kind: type[Optimizer], expected: Any) -> None:
    optimizer = for_policy(mode, kind, prepared(mode).parameters(), lr=0.1)
    assert type(optimizer) is expected
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("changes", "rounding"),
    [
        ({}, "nearest"),
        ({"rounding": "kahan"}, "kahan"),
        ({"name": "mine", "rounding": "stochastic"}, "stochastic"),
    ],
)
def test_storage_is_that_of_the_policy(changes: dict[str, Any], rounding: str) -> None:
    row = replace(
        policy("bf16_true"), momentum_dtype="bfloat16", variance_dtype="float16", **changes
    )
    optimizer = for_policy(row, torch.optim.AdamW, prepared("bf16_true").parameters(), seed=3)
    group = optimizer.param_groups[0]
    assert (group["rounding"], group["seed"]) == (rounding, 3)
    assert (group["momentum_dtype"], group["variance_dtype"]) == (torch.bfloat16, torch.float16)
    masters = for_policy(row, torch.optim.Adam, prepared("bf16_true").parameters())
    assert isinstance(masters, MasterWeights)
    assert masters.rounding == ("stochastic" if rounding == "stochastic" else "nearest")


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.AdamW, {}, optim.AdamW),
        (torch.optim.SGD, {"momentum": 0.9}, optim.SGD),
        (torch.optim.SGD, {}, torch.optim.SGD),  # it stores no moment
    ],
)
def test_moments_in_16_bits_beside_float32_parameters(
    kind: type[Optimizer], options: dict[str, Any], expected: Any
) -> None:
    row = replace(policy("bf16_mixed"), momentum_dtype="bfloat16")
    model = prepared("bf16_mixed")
    optimizer = for_policy(row, kind, model.parameters(), **options)
    assert type(optimizer) is expected
    step(optimizer, model)


def test_groups_named_parameters_and_frozen_ones() -> None:
    for mode in ("fp32", "bf16_sr"):
        for kind in (torch.optim.AdamW, torch.optim.Adam):
            model = prepared(mode)
            groups = [{"params": [model.weight], "lr": 0.5}, {"params": model.bias}]
            optimizer = for_policy(mode, kind, groups, lr=0.1)
            assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1]
            assert [p for g in optimizer.param_groups for p in g["params"]] == [*model.parameters()]
            step(optimizer, model)
            named = for_policy(mode, kind, model.named_parameters())
            assert named.param_groups[0]["params"] == [*model.parameters()]
            model.bias.requires_grad_(False)
            (group,) = for_policy(mode, kind, model.parameters()).param_groups
            assert group["params"] == [model.weight]


def test_options_that_choose_kernels_have_no_effect_and_others_are_refused() -> None:
    model = prepared("bf16_sr")
    options = {"fused": True, "foreach": False, "amsgrad": False, "eps": 1e-6}
    optimizer = for_policy("bf16_sr", torch.optim.AdamW, model.parameters(), **options)
    assert optimizer.param_groups[0]["eps"] == 1e-6
    with pytest.raises(ValueError, match=r"^amsgrad=True: AdamW in precision=bf16_sr .*legal: lr,"):
        for_policy("bf16_sr", torch.optim.AdamW, model.parameters(), amsgrad=True)


def test_mistakes_are_one_line() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"these are float32: call precision\.prepare\(model\)"):
        for_policy("bf16_sr", torch.optim.AdamW, model.parameters())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is trained"):
        for_policy("fp32", torch.optim.AdamW, model.parameters())
    with pytest.raises(ValueError, match="no precision mode is named 'bf61'"):
        for_policy("bf61", torch.optim.AdamW, model.parameters())
