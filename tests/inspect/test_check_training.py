"""A flat loss, a loss that is not finite, and a curve that leaves float32's are found."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.inspect.check import plan_check
from mprun.inspect.check_training import FEW, VISITS, trains
from mprun.results.check_result import CheckSettings, Finding, ModeChecks

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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("more", [["train.lr=0.01"], ["train.warmup_steps=200"]])
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
