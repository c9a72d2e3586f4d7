"""A mode that does not train as float32 does is found, with its module; healthy models are not."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.extra.numpy import array_shapes, arrays
from hypothesis.strategies import floats, integers, sampled_from
from torch import Tensor, nn

from mprun.inspect.check import check_agreement
from mprun.inspect.check.check import plan_check
from mprun.inspect.check.check_agreement import (
    CAPTURE_S,
    DIRECTION_PASSES,
    FEW,
    VISITS,
    agrees,
    trains,
)
from mprun.inspect.check.check_result import CheckSettings, Finding, ModeChecks
from mprun.inspect.check.checked_mode import (
    CheckedMode,
    Figures,
    StepPasses,
    with_moved_inputs,
)
from mprun.inspect.divergence import boundaries, side_by_side
from mprun.inspect.rounding_oracle import KINKS
from mprun.precision.nested import to_dtype
from mprun.train.data import Batch, MicroBatch

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


def planned(mode: str, change: Change, *more: str, loss: Any = F.cross_entropy) -> CheckedMode:
    """The check of a model with a change of its hidden layer in it, called "2.1"."""
    torch.manual_seed(1)
    part = nn.Sequential(nn.Linear(32, 32), Changed(change), nn.ReLU())
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), part, nn.Linear(32, 4))
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    batch = (x, x[:, :4].argmax(1))
    (checked,) = plan_check(
        [f"precision={mode}", *more], None, CheckSettings(), (model, batch, loss)
    )
    return checked


def disagreeing(mode: str, change: Change, loss: Any = F.cross_entropy) -> list[Finding]:
    """The findings of `agrees`."""
    checked = planned(mode, change, loss=loss)
    with checked.planned.executing():
        return list(agrees(checked))


def trained(mode: str, change: Change, *more: str) -> list[Finding]:
    """The findings of `trains`."""
    checked = planned(mode, change, *more)
    with checked.planned.executing():
        return list(trains(checked))


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.representative("lr-*", "warmup-fp16_mixed")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "more", [["train.lr=0.01"], ["train.warmup_steps=200"]], ids=["lr", "warmup"]
)
def test_a_healthy_model_trains(mode: str, more: list[str]) -> None:
    assert trained(mode, nn.Dropout(0.2), *more) == []


@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed"])
def test_where_float32_learns_too_slowly_nothing_is_judged(mode: str) -> None:
    checked = planned(mode, nn.Identity(), "train.lr=1e-9")
    with checked.planned.executing():
        assert list(trains(checked)) == []
    assert "in 96 steps" in checked.checks.not_done["trains"]
    assert "needs more steps (check.steps)" in checked.checks.not_done["trains"]


def test_a_mode_that_does_not_learn_where_float32_does() -> None:
    def cut(x: Tensor) -> Tensor:
        return x.detach() * 0 + x[0, 0] * 1e-6 if x.dtype == torch.bfloat16 else x

    kinds = [x.kind for x in trained("bf16_mixed", cut, "train.lr=0.05")]
    assert "loss_does_not_fall" in kinds


def test_batches_whose_losses_differ_a_lot_are_no_noise() -> None:
    """One of four batches has a loss a thousand times the others': the fall is of the same ones."""

    def torch_is_apart(x: Tensor) -> Tensor:
        return x * torch.where(x.abs().amax() > 1.9, 30.0, 1.0)

    assert trained("fp32", torch_is_apart, "train.lr=0.01") == []


def test_the_op_that_makes_the_loss_infinite_is_named() -> None:
    (finding,) = trained("fp16_mixed", lambda x: x * 1e5 if x.dtype == torch.float16 else x)
    assert (finding.kind, finding.module, finding.op) == ("not_finite", "2.1", "mul"), str(finding)
    assert "test_check_agreement.py" in finding.line


def test_another_curve_than_float32s() -> None:
    def stronger(x: Tensor) -> Tensor:
        return x * 1.2 if x.dtype == torch.bfloat16 else x

    findings = trained("bf16_mixed", stronger, "train.lr=0.01")
    assert [x.kind for x in findings] == ["other_curve"]
    assert trained("fp32", stronger, "train.lr=0.01") == []


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


def test_steps_are_fewer_where_a_step_is_slow_and_what_is_left_out_is_said() -> None:
    calls: list[Tensor] = []

    def slow(x: Tensor) -> Tensor:
        calls.append(x)
        time.sleep(0.01)
        return x

    def counted(seconds: float) -> tuple[int, ModeChecks]:
        mode = planned("bf16_mixed", slow, "train.lr=0.01")
        calls.clear()
        mode.ends = time.monotonic() + seconds
        with mode.planned.executing():
            assert list(trains(mode)) == []
        return len(calls), mode.checks

    steps, checks = counted(0.05)  # of five steps
    assert checks.figures["steps"] == VISITS * 4
    # float32's as well, two of them to measure the time, and its first losses when moved
    assert steps == 2 * VISITS * 4 + 2 + FEW - 1
    assert checks.not_done == {"curve": "no time for more than 0 of 8 starts of 12 steps"}
    steps, checks = counted(600)
    assert checks.figures["steps"] == CheckSettings().steps
    assert steps >= 2 * FEW * CheckSettings().steps
    assert checks.not_done == {}


# ---- agreement -----------------------------------------------------------------------------------


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
    assert disagreeing(mode, change) == []


@pytest.mark.parametrize(
    ("mode", "change", "other"),
    [
        ("bf16_mixed", lambda x: x * 1.1 if x.dtype == BF16 else x, "fp16_mixed"),
        ("fp16_mixed", lambda x: x * 1.02 if x.dtype == torch.float16 else x, "fp32"),
        ("fp32", lambda x: x.bfloat16().float(), "bf16_mixed"),
    ],
)
def test_a_module_with_an_error_beyond_its_bound(mode: str, change: Change, other: str) -> None:
    (finding,) = disagreeing(mode, change)
    assert (finding.kind, finding.module) == ("larger_error", "2.1")
    assert "test_check_agreement.py" in finding.line
    assert finding.line.endswith("(<lambda>)")  # the op's, not where the module's forward begins
    assert disagreeing(other, change) == []


def test_a_model_runs_in_float64_no_more_often_than_its_errors_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bool] = []

    def run_forced(*args: Any, rounded: bool, seed: int = 0) -> Any:
        taken.append(rounded)
        return boundaries.run_forced(*args, rounded=rounded, seed=seed)

    monkeypatch.setattr(side_by_side, "run_forced", run_forced)
    assert disagreeing("bf16_mixed", nn.Identity()) == []
    assert taken == [False, True]  # one rounded pass explains every error
    taken.clear()
    assert disagreeing("bf16_mixed", lambda x: x * 1.1 if x.dtype == BF16 else x) != []
    # four before a module is suspect, on two batches; one in float32, which has no such error
    assert [*map(taken.count, (False, True))] == [3, 9]


def test_a_rounding_to_infinity_in_a_later_pass_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = check_agreement._difference

    def difference(passes: StepPasses, n: int) -> Figures:
        own = taken(passes, n)
        return own if n < DIRECTION_PASSES else {x: y * math.inf for x, y in own.items()}

    monkeypatch.setattr(check_agreement, "_difference", difference)
    assert disagreeing("fp16_mixed", nn.Identity()) == []


def test_what_does_not_fit_into_the_budget_is_said() -> None:
    checked = planned("bf16_mixed", nn.Identity())
    checked.ends = time.monotonic() + 5
    checked.shared[CAPTURE_S] = 60.0
    with checked.planned.executing():
        assert list(agrees(checked)) == []
    assert checked.checks.not_done == {"agrees": "no time for all of its passes"}


def test_a_path_that_is_cut_in_one_dtype() -> None:
    (finding,) = disagreeing("bf16_mixed", lambda x: x.detach() if x.dtype == BF16 else x)
    assert (finding.kind, finding.module) == ("no_gradient", "2.0")


def test_a_loss_with_another_factor_in_one_mode() -> None:
    last = [torch.float32]

    def noted(x: Tensor) -> Tensor:
        last[0] = x.dtype
        return x + 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) / (0.98 if last[0] == BF16 else 1)

    (finding,) = disagreeing("bf16_mixed", noted, loss)
    assert (finding.kind, finding.module) == ("far_from_float32", "")
    assert finding.text.startswith("the loss is")
    assert disagreeing("fp16_mixed", noted, loss) == []


def test_a_clamp_of_scaled_gradients() -> None:
    def clamped(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g.clamp(-1, 1))
        return x

    (finding,) = [
        x for x in disagreeing("fp16_mixed", clamped) if x.kind == "scale_changes_gradient"
    ]
    assert finding.module == "2.0"  # the backward pass arrives there first
    assert disagreeing("bf16_mixed", clamped) == []


def test_a_cast_of_the_code_is_no_clip() -> None:
    """Its gradients have the digits of float16, so that small ones are 0 without a loss scale."""

    def small(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * 1e-6

    found = disagreeing("fp16_mixed", lambda x: x.half().float(), small)
    assert "scale_changes_gradient" not in [x.kind for x in found]


def test_how_much_noise_moves_the_mean_of_a_jump() -> None:
    places = torch.linspace(-8, 8, 10_001, dtype=torch.float64)
    above = torch.special.ndtr(places)  # the share of passes in which the noise lifts it above 0
    moved = above - (places > 0).double()
    spread = above * (1 - above)
    assert (moved.square().sum() / spread.sum()).sqrt().item() == pytest.approx(KINKS, rel=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.representative("True")
@pytest.mark.parametrize("faulty", [True, False])
def test_the_compiled_step_is_checked_where_the_run_compiles(faulty: bool) -> None:
    def other_epsilon(graph: Any) -> None:
        for node in graph.nodes if faulty else ():
            if node.target is torch.ops.aten.add.Tensor and node.args[1] == 1e-5:
                node.args = (node.args[0], 0.3)

    mode = planned("fp32", lambda x: x, "speed.compile=true")
    with inductor.patch(post_grad_custom_pre_pass=other_epsilon):
        found = [x for x in agrees(mode) if x.kind == "compiled_differs"]
    assert [(x.module, x.op.startswith("cpp_fused")) for x in found] == [("1", True)] * faulty
