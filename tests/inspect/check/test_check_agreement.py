"""Errors larger than roundings are found, with their module; healthy models have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.inspect.check.check import plan_check
from mprun.inspect.check.check_agreement import KINKS, agrees
from mprun.inspect.check.check_result import CheckSettings, Finding

BF16 = torch.bfloat16
MODES = ("fp32", "bf16_mixed", "fp16_mixed", "bf16_true", "bf16_sr")
Change = Callable[[Tensor], Tensor]


class Changed(nn.Module):
    """What it does may depend on the dtype."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


class Half(torch.autograd.Function):
    """The identity, whose backward pass loses a factor of 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g / 2


def found(mode: str, change: Change, loss: Any = F.cross_entropy) -> list[Finding]:
    """The findings for a model with a change of its hidden layer in it."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    part = nn.Sequential(nn.Linear(32, 32), Changed(change), nn.ReLU())
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), part, nn.Linear(32, 4))
    x = torch.randn(256, 8, generator=g)
    given = (model, (x, x[:, :4].argmax(1)), loss)
    (checked,) = plan_check([f"precision={mode}"], None, CheckSettings(), given)
    with checked.planned.executing():
        return list(agrees(checked))


def gated(x: Tensor) -> Tensor:
    """Each row through the half of its larger sum, as a router does."""
    low, high = x.chunk(2, dim=1)
    first = (low.sum(1, keepdim=True) > high.sum(1, keepdim=True)).to(x.dtype)
    return torch.cat([low * first, high * (1 - first)], dim=1)


@pytest.mark.representative("gated-*", "dropout-bf16_mixed", "dropout-tf32", "noise-fp16_mixed")
@pytest.mark.parametrize("mode", [*MODES, "tf32"])
@pytest.mark.parametrize(
    "change",
    [nn.Dropout(0.2), gated, lambda x: x + torch.randn_like(x)],
    ids=["dropout", "gated", "noise"],
)
def test_a_healthy_model_has_no_findings(mode: str, change: Change) -> None:
    assert found(mode, change) == []


@pytest.mark.parametrize(
    ("mode", "change", "other"),
    [
        ("bf16_mixed", lambda x: x * 1.1 if x.dtype == BF16 else x, "fp16_mixed"),
        ("fp16_mixed", lambda x: x * 1.02 if x.dtype == torch.float16 else x, "fp32"),
        ("fp32", lambda x: x.bfloat16().float(), "bf16_mixed"),
    ],
)
def test_a_module_with_an_error_beyond_its_bound(mode: str, change: Change, other: str) -> None:
    (finding,) = found(mode, change)
    assert (finding.kind, finding.module) == ("larger_error", "2.1")
    assert "test_check_agreement.py" in finding.line
    assert found(other, change) == []


def test_a_path_that_is_cut_in_one_dtype() -> None:
    (finding,) = found("bf16_mixed", lambda x: x.detach() if x.dtype == BF16 else x)
    assert (finding.kind, finding.module) == ("no_gradient", "2.0")


def test_a_loss_with_another_factor_in_one_mode() -> None:
    last = [torch.float32]

    def noted(x: Tensor) -> Tensor:
        last[0] = x.dtype
        return x + 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) / (0.98 if last[0] == BF16 else 1)

    (finding,) = found("bf16_mixed", noted, loss)
    assert (finding.kind, finding.module) == ("far_from_float32", "")
    assert finding.text.startswith("the loss is")
    assert found("fp16_mixed", noted, loss) == []


def test_a_clamp_of_scaled_gradients() -> None:
    def clamped(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g.clamp(-1, 1))
        return x

    (finding,) = [x for x in found("fp16_mixed", clamped) if x.kind == "scale_changes_gradient"]
    assert finding.module in ("0", "1", "2.0")
    assert found("bf16_mixed", clamped) == []


def test_a_backward_pass_that_loses_a_factor() -> None:
    (finding,) = found("fp32", Half.apply)
    assert (finding.kind, finding.module, finding.severity) == ("wrong_derivative", "2", "warning")


def test_how_much_noise_moves_the_mean_of_a_jump() -> None:
    places = torch.linspace(-8, 8, 10_001, dtype=torch.float64)
    above = torch.special.ndtr(places)  # the share of passes in which the noise lifts it above 0
    moved = above - (places > 0).double()
    spread = above * (1 - above)
    assert (moved.square().sum() / spread.sum()).sqrt().item() == pytest.approx(KINKS, rel=1e-5)
