"""Running statistics and other floating buffers under overflows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mprun.cli.main import main
from mprun.precision import (
    DynamicLossScale,
    DynamicRule,
    LossScale,
    Precision,
    StaticLossScale,
)
from mprun.precision.layers import convert
from mprun.precision.loss_scale import BufferOverflow
from mprun.recipes.linear import Linear
from tests.each import each

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


# ---- several models ----


def in_float16(loss_scale: LossScale) -> Precision:
    return Precision("fp16_true", device=CPU, execution="native", loss_scale=loss_scale)


def test_each_prepared_model_keeps_its_guard() -> None:
    models = [net(), net()]
    precision = in_float16(DynamicLossScale(16.0, DynamicRule(), CPU))
    for model in models:
        precision.prepare(model, CPU)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    before = [m[1].running_mean.clone() for m in models]
    precision.begin_step(1)
    for model, optimizer in zip(models, optimizers, strict=True):
        model[0].weight.data.fill_(1.0)  # four times 60,000 is too much for float16
        precision.backward(precision.forward(model, torch.full((8, 4), 6e4).half()).sum())
        assert not torch.isfinite(model[1].running_mean).all()
        skipped = precision.step(optimizer)
        assert skipped is not None
        assert skipped.item() == 1
    precision.update()
    for model, mean in zip(models, before, strict=True):
        assert torch.equal(model[1].running_mean, mean)
    assert precision.buffer_overflows() == []


# ---- what is restored, what is reported ----


class Counts(nn.Module):
    """A model with float16 buffers, which its forward pass adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("total", torch.zeros(3, 2))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += x
            self.last.copy_(x.sum())
        return self.weight * 1.0


def counting(loss_scale: LossScale) -> tuple[Counts, Precision]:
    model, precision = Counts(), in_float16(loss_scale)
    precision.prepare(model, CPU)
    return model, precision


def one_step(
    model: nn.Module, precision: Precision, number: int, x: Tensor, factor: float = 1
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    precision.begin_step(number)
    precision.backward(precision.forward(model, x).sum() * factor)
    precision.step(optimizer)
    precision.update()


LARGE = torch.tensor([[1.0, 2.0], [1.0, 6e4], [6e4, 6e4]]).half()


def test_a_skipped_step_restores_only_what_became_non_finite() -> None:
    model, precision = counting(StaticLossScale(8.0, CPU))
    one_step(model, precision, 1, LARGE / 4)
    before = model.total.clone()
    one_step(model, precision, 2, LARGE, factor=torch.inf)
    expected = before + LARGE
    overflowed = ~torch.isfinite(expected)
    assert overflowed.tolist() == [[False, False], [False, True], [True, True]]
    assert torch.equal(model.total, torch.where(overflowed, before, expected))
    assert precision.buffer_overflows() == []


@each("kind", ["none", "static"])
def test_an_overflow_on_a_step_that_is_taken_is_reported_once_and_stays(kind: str) -> None:
    scale = LossScale() if kind == "none" else StaticLossScale(8.0, CPU)
    model, precision = counting(scale)
    for step in range(1, 6):
        one_step(model, precision, step, LARGE / 2)  # above 65,504 in step 3
    assert not torch.isfinite(model.total[2]).any()
    last, total = precision.buffer_overflows()
    assert total == BufferOverflow(3, "total", [1, 2], "float16")
    assert last == BufferOverflow(1, "last", [], "float16")  # the sum is 91,500
    assert "step 3" in total.text
    assert "buffer total, channel 1, 2 non-finite (float16)" in total.text
    one_step(model, precision, 6, LARGE / 2)
    assert precision.buffer_overflows() == []


def test_buffers_may_be_replaced_after_prepare() -> None:
    model, precision = counting(LossScale())
    model.load_state_dict(model.state_dict(), assign=True)
    model.total = model.total.clone()
    one_step(model, precision, 1, LARGE * 2)
    assert {o.buffer for o in precision.buffer_overflows()} == {"total", "last"}


# ---- running statistics in float32 ----


@each("dtype", [torch.float16, torch.bfloat16])
@each("kind", [nn.BatchNorm2d, partial(nn.InstanceNorm2d, affine=True, track_running_stats=True)])
def test_a_norm_with_float32_statistics_equals_one_in_float32(
    kind: Callable[[int], nn.Module], dtype: torch.dtype
) -> None:
    """In training and in evaluation, to half a unit of the 16-bit output; gradients alike."""
    torch.manual_seed(0)
    exact, norm = kind(4), kind(4)
    for p, q in zip(exact.parameters(), norm.parameters(), strict=True):
        p.data = q.data = torch.randn(4).to(dtype).float()
    convert(norm, CPU, dtype)
    x = (torch.randn(8, 4, 5, 5) * 1000).to(dtype)
    for training in (True, False):
        exact.train(training)
        norm.train(training)
        output, expected = norm(x), exact(x.float())
        assert output.dtype == dtype
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(output.float(), expected, rtol=unit, atol=unit)
        torch.testing.assert_close(norm.running_var, exact.running_var, rtol=1e-5, atol=0)
        norm.zero_grad()
        exact.zero_grad()
        output.sum().backward()
        expected.sum().backward()
        assert norm.bias.grad.dtype == norm.bias.dtype == dtype  # type: ignore[union-attr]
        assert torch.equal(norm.bias.grad.float(), exact.bias.grad)  # type: ignore[union-attr,arg-type]


def test_a_norm_with_a_forward_of_its_own_keeps_its_statistics_dtype() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return (input - self.running_mean) * self.weight

    norm = convert(Own(3), CPU, torch.float16)
    assert norm.running_mean.dtype == torch.float16
    assert norm(torch.ones(2, 3).half()).dtype == torch.float16


class Sums(nn.Linear):
    """A linear layer with a float16 buffer that overflows in the second step."""

    def __init__(self, *features: int) -> None:
        super().__init__(*features)
        self.register_buffer("sums", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.sums += torch.tensor([1.0, 4e4, 1.0], dtype=self.sums.dtype)
        return super().forward(x)


@dataclass(frozen=True)
class Totals(Linear):
    """`recipe=linear` with that layer."""

    def model(self) -> nn.Module:
        return Sums(self.in_features, self.out_features)


def test_an_overflow_is_an_event_of_the_run_and_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["recipe=linear", "recipe.target=tests.precision.test_buffers.Totals"]
    words += ["precision=fp16_true", "loss_scale=none", "train.max_steps=4", "run.dir=run"]
    assert main(words) == 0
    lines = [json.loads(x) for x in Path("run/metrics.jsonl").read_text().splitlines()]
    (event,) = [x for x in lines if x.get("event") == "buffer_overflow"]
    assert event["kind"] == "event"
    assert event["step"] == event["epoch"] == 2  # a batch is all of the data
    assert event["buffer"] == "sums"
    assert event["channels"] == [1]
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "warning: step 2 was taken and made the buffer sums, channel 1 non-finite" in printed
