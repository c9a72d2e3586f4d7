"""A flat loss, a loss that is not finite, and a curve that leaves float32's are found."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.extra.numpy import array_shapes, arrays
from hypothesis.strategies import floats, integers, sampled_from
from torch import Tensor, nn

from mprun.inspect.check.check import plan_check
from mprun.inspect.check.check_result import CheckSettings, Finding, ModeChecks
from mprun.inspect.check.check_training import FEW, VISITS, trains, with_moved_inputs
from mprun.precision.nested import to_dtype
from mprun.train.data import Batch, MicroBatch

MODES = ("fp32", "bf16_mixed", "fp16_mixed", "bf16_true", "bf16_sr")
Change = Callable[[Tensor], Tensor]


class Changed(nn.Module):
    """What it does depends on the dtype."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def found(mode: str, change: Change, *more: str) -> list[Finding]:
    """The findings of `trains` for a model with a change of its hidden layer in it."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), Changed(change), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(256, 8, generator=g)
    given = (model, (x, x[:, :4].argmax(1)), F.cross_entropy)
    (checked,) = plan_check([f"precision={mode}", *more], None, CheckSettings(), given)
    with checked.planned.executing():
        return list(trains(checked))


@pytest.mark.representative("lr-*", "warmup-fp16_mixed")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "more", [["train.lr=0.01"], ["train.warmup_steps=200"]], ids=["lr", "warmup"]
)
def test_a_healthy_model_trains(mode: str, more: list[str]) -> None:
    assert found(mode, nn.Dropout(0.2), *more) == []


@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed"])
def test_a_loss_that_stands_still(mode: str) -> None:
    (finding,) = found(mode, nn.Identity(), "train.lr=1e-9")
    assert finding.kind == "loss_does_not_fall"
    assert "in 96 steps" in finding.text


def test_the_op_that_makes_the_loss_infinite_is_named() -> None:
    (finding,) = found("fp16_mixed", lambda x: x * 1e5 if x.dtype == torch.float16 else x)
    assert (finding.kind, finding.module, finding.op) == ("not_finite", "1", "mul"), str(finding)
    assert "test_check_training.py" in finding.line


def test_another_curve_than_float32s() -> None:
    def stronger(x: Tensor) -> Tensor:
        return x * 1.2 if x.dtype == torch.bfloat16 else x

    findings = found("bf16_mixed", stronger, "train.lr=0.01")
    assert [x.kind for x in findings] == ["other_curve"]
    assert found("fp32", stronger, "train.lr=0.01") == []


def test_inputs_that_are_rounded_alike_in_all_steps_make_no_other_curve() -> None:
    """Eight samples of eight numbers: their rounding moves the loss by 2e-4, always the same."""
    overrides = ["recipe=linear", "recipe.model.in_features=8", "precision=bf16_mixed"]
    (mode,) = plan_check(overrides, None, CheckSettings(samples=8, steps=6))
    with mode.planned.executing():
        assert list(trains(mode)) == []


@settings(max_examples=50, deadline=None)
@given(
    value=arrays(
        "float32",
        array_shapes(max_dims=3, max_side=5),
        elements=floats(-(2.0**20), 2.0**20, width=32),
    ),
    number=integers(0, 7),
    share=sampled_from([2.0**-8, 2.0**-24]),
)
def test_inputs_are_moved_by_a_share_of_themselves_and_whole_numbers_are_not(
    value: Any, number: int, share: float
) -> None:
    x = torch.from_numpy(value)
    inputs = {"x": x, "whole": x.round(), "ids": torch.arange(3)}
    wide = Batch((MicroBatch((inputs, x), inputs, 1, 1),))
    own = Batch((MicroBatch((inputs, x), to_dtype(inputs, torch.bfloat16), 1, 1),))
    (moved,), (narrow,) = (with_moved_inputs([b], [wide], share, number) for b in (wide, own))
    (found,) = moved.parts
    assert found.content[1] is x  # the target
    assert torch.equal(found.inputs["whole"], inputs["whole"])
    assert found.inputs["ids"] is inputs["ids"]
    exact = x.double()  # the share and the product are each rounded to float32 once
    assert ((found.inputs["x"] - exact).abs() <= (share + 2.0**-23) * exact.abs() + 1e-44).all()
    assert (found.inputs["x"].floor() >= x.floor()).all()
    assert (found.inputs["x"].ceil() <= x.ceil()).all()
    same = to_dtype(found.inputs["x"], torch.bfloat16)
    assert torch.equal(narrow.parts[0].inputs["x"], same)  # of the same numbers, in its dtype


class Slow(nn.Module):
    """Counts its steps, each of which takes a while."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        Slow.steps += 1
        time.sleep(0.01)
        return x


def test_steps_are_fewer_where_a_step_is_slow_and_what_is_left_out_is_said() -> None:
    def counted(seconds: float) -> tuple[int, ModeChecks]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 32), Slow(), nn.ReLU(), nn.Linear(32, 4))
        x = torch.randn(256, 8)
        given = (model, (x, x[:, :4].argmax(1)), F.cross_entropy)
        overrides = ["precision=bf16_mixed", "train.lr=0.01"]
        (mode,) = plan_check(overrides, None, CheckSettings(), given)
        Slow.steps, mode.ends = 0, time.monotonic() + seconds
        with mode.planned.executing():
            assert list(trains(mode)) == []
        return Slow.steps, mode.checks

    steps, checks = counted(0.05)  # of five steps
    assert checks.figures["steps"] == VISITS * 4
    assert steps == VISITS * 4 + FEW  # and float32's first losses
    assert checks.not_done == {"curve": "no time for more than 0 of 8 starts of 12 steps"}
    steps, checks = counted(600)
    assert checks.figures["steps"] == CheckSettings().steps
    assert steps >= 2 * FEW * CheckSettings().steps
    assert checks.not_done == {}
