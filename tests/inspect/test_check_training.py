"""A flat loss, a loss that is not finite, and a curve that leaves float32's are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.inspect.check import plan_check
from mprun.inspect.check_training import trains
from mprun.results.check_result import CheckSettings, Finding

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
