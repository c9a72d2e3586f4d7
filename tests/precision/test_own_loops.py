"""What training code does with a mode, in every mode; PyTorch's own loop is the oracle.

fp32, bf16_mixed and fp16_mixed must equal `torch.autocast` with `torch.amp.GradScaler` bit for bit.
The other modes have no such loop: they are held to float64, within the unit of their dtype, or to
the same training done in another way, bit for bit.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from mprun.precision import Precision, same_rounding
from tests.each import each
from tests.precision.loops import (
    AMP,
    CASES,
    SCALE,
    Case,
    Loop,
    Net,
    Ours,
    batches,
    distance,
    equal,
    gradients,
    loops,
    made,
    train_step,
)

pytestmark = pytest.mark.usefixtures("native_is_fast")

every_case = each("case", CASES, ids=str)
amp_modes = each("mode", AMP)
STEPS = 6


def scaled_loop(case: Case) -> Ours:
    """The case with a loss scale under which nothing overflows, where it has one."""
    scaled = case.precision().loss_scale.tensor is not None
    return Ours(case, **({"loss_scale": SCALE} if scaled else {}))


def unscaled(loop: Ours, model: nn.Module) -> list[Tensor]:
    return [g / loop.scale for g in gradients(model)]


def float64_gradients(model: nn.Module, loss: Any) -> list[Tensor]:
    """The gradients of `loss(model)` in float64, from the weights as the mode stores them."""
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    loss(exact).backward()
    return gradients(exact)


def trained(loop: Loop, step: Any = train_step, kind: Any = Net) -> nn.Module:
    model = loop.prepare(made(kind))
    optimizer = loop.optimizer(model)
    for x, y in batches(STEPS):
        step(loop, model, optimizer, x, y)
    return model


# ---- gradient accumulation -----------------------------------------------------------------------


def accumulating_step(loop: Loop, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loop.begin()
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        output = loop.forward(model, part)
        loop.backward(loop.loss(cross_entropy, output, target, share=1 / 4))
    loop.step(optimizer)
    loop.update()


@amp_modes
def test_accumulation_is_that_of_the_raw_loop(mode: str) -> None:
    ours, raw = loops(mode)
    assert equal(trained(ours, accumulating_step), trained(raw, accumulating_step))


@every_case
def test_accumulated_gradients_are_those_of_one_large_batch(case: Case) -> None:
    """Up to rounding: of each result, and of the three sums in the gradients' dtype."""
    ((x, y),) = batches(1, rows=64)
    taken = []
    for parts in (1, 4):
        loop, model = scaled_loop(case), made()
        loop.prepare(model)
        loop.begin()
        for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            output = loop.forward(model, part)
            loop.backward(loop.loss(cross_entropy, output, target, share=1 / parts))
        taken.append(gradients(model))
    assert distance(*taken) < 4 * case.eps


# ---- gradient penalty: a gradient of a gradient --------------------------------------------------


def slope_penalty(slope: Tensor) -> Tensor:
    return (slope.norm(dim=1) - 1).square().mean()


def penalized_loss(loop: Loop, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = loop.forward(model, x)
    (slope,) = loop.grad(output.square().sum(), [x])
    return loop.loss(cross_entropy, output, y) + loop.loss(slope_penalty, slope)


def penalized_step(loop: Loop, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loop.begin()
    loop.backward(penalized_loss(loop, model, x, y))
    loop.step(optimizer)
    loop.update()


@amp_modes
def test_a_gradient_penalty_is_that_of_the_raw_loop(mode: str) -> None:
    ours, raw = loops(mode)
    assert equal(trained(ours, penalized_step), trained(raw, penalized_step))


@every_case
def test_the_gradients_of_a_penalty_are_those_of_float64(case: Case) -> None:
    """A dozen rounded ops forward and backward: an error of a few units of the dtype."""
    ((x, y),) = batches(1)
    loop, model = scaled_loop(case), made()
    loop.prepare(model)
    loop.begin()
    loop.backward(penalized_loss(loop, model, x, y))

    def exact(model: nn.Module) -> Tensor:
        inputs = x.double().requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.square().sum(), [inputs], create_graph=True)
        return cross_entropy(output, y) + slope_penalty(slope)

    assert distance(unscaled(loop, model), float64_gradients(model, exact)) < 8 * case.eps


def test_small_gradients_survive_float16_in_grad() -> None:
    """Weights of 1e-5 give a slope of 1e-10, which float16 cannot hold; times the scale it can."""
    precision = Case("fp16_mixed").precision(loss_scale=2.0**15)
    x = torch.ones(1, 1, requires_grad=True)
    first, last = (nn.Linear(1, 1, bias=False) for _ in range(2))
    for layer in (first, last):
        nn.init.constant_(layer.weight, 1e-5)
    output = precision.forward(nn.Sequential(first, last), x)
    (slope,) = precision.grad(output.sum(), [x])
    assert slope.item() == pytest.approx(1e-10, rel=0.03)  # 55 units of the smallest numbers
    (lost,) = torch.autograd.grad(precision.forward(nn.Sequential(first, last), x).sum(), [x])
    assert lost.item() == 0


# ---- activation checkpointing --------------------------------------------------------------------


class Checkpointed(Net):
    """`Net`, whose hidden layer is computed again in the backward pass, with its dropout.

    Args:
        reentrant: `use_reentrant`; None for no checkpointing.
    """

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def hidden(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().hidden(x), 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last.weight.new_zeros(()).requires_grad_() + x  # reentrant ones need a gradient
        if self.reentrant is None:
            hidden = self.hidden(x)
        elif self.reentrant:
            hidden = checkpoint(self.hidden, x, use_reentrant=True)
        else:
            hidden = checkpoint(self.hidden, x, use_reentrant=False, context_fn=same_rounding)
        output: Tensor = self.last(hidden)
        return output


def checkpointed_gradients(case: Case, reentrant: bool | None) -> list[Tensor]:
    ((x, y),) = batches(1)
    loop = scaled_loop(case)
    model = loop.prepare(made(lambda: Checkpointed(reentrant)))
    loop.begin()
    torch.manual_seed(3)
    loop.backward(loop.loss(cross_entropy, loop.forward(model, x), y))
    return gradients(model)


@each("reentrant", [False, True], ids=["use_reentrant=False", "True"])
@every_case
def test_checkpointing_changes_no_bit_of_the_gradients(case: Case, reentrant: bool) -> None:
    expected = checkpointed_gradients(case, None)
    if case.mode == "half_sr_full" and reentrant:  # it has no place for the random bits
        with pytest.warns(UserWarning, match="other random bits"):
            got = checkpointed_gradients(case, reentrant)
        assert 0 < distance(got, expected) < 4 * case.eps
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = checkpointed_gradients(case, reentrant)
    assert all(map(torch.equal, got, expected))


# ---- learning-rate schedules and skipped steps ---------------------------------------------------


def scheduled(loop: Loop) -> tuple[nn.Module, list[bool], int]:
    """A model whose third batch overflows in float16; the steps that were taken, and counted."""
    model = loop.prepare(made())
    optimizer = loop.optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    taken = []
    for number, (x, y) in enumerate(batches(STEPS)):
        taken.append(train_step(loop, model, optimizer, x * (1e5 if number == 2 else 1), y))
        if taken[-1]:
            schedule.step()
    return model, taken, schedule.last_epoch


@amp_modes
def test_a_schedule_steps_as_in_the_raw_loop(mode: str) -> None:
    ours, raw = loops(mode)
    (mine, taken, count), (theirs, *expected) = scheduled(ours), scheduled(raw)
    assert [taken, count] == expected
    assert taken == [number != 2 or mode != "fp16_mixed" for number in range(STEPS)]
    assert equal(mine, theirs)
    assert ours.scale == raw.scale


# ---- torch.compile -------------------------------------------------------------------------------


def compiled_gradients(case: Case, backend: str | None) -> tuple[list[Tensor], int]:
    """The gradients of a compiled model, or an eager one, and how many frames were compiled."""
    torch.compiler.reset()
    counters.clear()
    ((x, y),) = batches(1)
    loop = scaled_loop(case)
    model = loop.prepare(made())
    run = model if backend is None else torch.compile(model, backend=backend)
    loop.begin()
    loop.backward(loop.loss(cross_entropy, loop.forward(run, x), y))  # type: ignore[arg-type]
    return gradients(model), counters["frames"]["ok"]


NATIVE = [Case(c.mode, {**c.options, "execution": "native"}) for c in CASES[:6] + CASES[7:9]]


@pytest.mark.representative(
    *("bf16_mixed-native", "fp16_mixed-native", "bf16_sr-native", "half_sr-native"),
    "bf16_mixed-hmp-native",
)
@pytest.mark.parametrize("case", NATIVE, ids=str)
def test_native_modes_compile_to_the_same_gradients(case: Case) -> None:
    """PyTorch's compiler may round fused ops once instead of twice: a unit of the dtype or two."""
    expected, _ = compiled_gradients(case, None)
    got, frames = compiled_gradients(case, "aot_eager")
    assert frames > 0
    assert distance(got, expected) < 2 * case.eps


@each("case", [CASES[6], CASES[9]], ids=str)
def test_where_nothing_can_be_compiled_a_warning_says_so_and_the_bits_are_eager_s(
    case: Case,
) -> None:
    expected, _ = compiled_gradients(case, None)
    with pytest.warns(UserWarning, match=r"torch\.compile has no effect .*execution='native'"):
        got, _ = compiled_gradients(case, "aot_eager")
    assert all(map(torch.equal, got, expected))


# ---- checkpoints of a training -------------------------------------------------------------------


@each("kind", [torch.optim.AdamW, torch.optim.Adam], ids=lambda k: k.__name__)
@every_case
def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(
    case: Case, kind: Any, tmp_path: Path
) -> None:
    def parts() -> tuple[Ours, nn.Module, Any]:
        loop, model = Ours(case), made()
        loop.prepare(model)
        return loop, model, loop.optimizer(model, kind)

    loop, model, optimizer = parts()
    data = batches(8)
    for x, y in data[:5]:
        train_step(loop, model, optimizer, x, y)
    states = [part.state_dict() for part in (model, optimizer, loop.precision)]
    torch.save(states, tmp_path / "checkpoint.pt")
    for x, y in data[5:]:
        train_step(loop, model, optimizer, x, y)

    again, other, new = parts()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for part, state in zip((other, new, again.precision), saved, strict=True):
        part.load_state_dict(state)
    assert again.precision.steps == 5
    for x, y in data[5:]:
        train_step(again, other, new, x, y)
    assert equal(model, other)
    assert again.scale == loop.scale


def test_a_state_of_another_kind_is_refused_in_one_line() -> None:
    scaled, plain = Precision("fp16_mixed", device="cpu"), Precision("fp32", device="cpu")
    with pytest.raises(ValueError, match="no loss is scaled"):
        plain.load_state_dict(scaled.state_dict())
    with pytest.raises(ValueError, match="nothing; legal for a dynamic loss scale: scale, tracker"):
        scaled.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="the state has weight; legal: steps, loss_scale"):
        plain.load_state_dict({"weight": 1})


# ---- mistakes ------------------------------------------------------------------------------------


@each("case", [CASES[0], CASES[4]], ids=str)
def test_an_optimizer_made_before_prepare_is_refused(case: Case) -> None:
    loop, model = Ours(case), made()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.prepare(model)
    (x, y), *_ = batches(1)
    with pytest.raises(RuntimeError, match=r"SGD was made before precision\.prepare\(model\)"):
        train_step(loop, model, early, x, y)


def test_a_step_that_did_not_begin_is_refused_where_its_number_is_needed() -> None:
    precision, model = Case("half_sr_full").precision(), made()
    precision.prepare(model)
    loss = precision.forward(model, torch.randn(2, 8)).sum()
    with pytest.raises(RuntimeError, match=r"call precision\.begin_step\(\)"):
        precision.backward(loss)
