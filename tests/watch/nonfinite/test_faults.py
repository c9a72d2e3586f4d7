"""Planted faults: the op, the module, the phase, the line and the cause are named exactly."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

from mprun import optim
from mprun.precision import OpListCaster, op_lists
from mprun.watch.nonfinite import FpException, NonfiniteReport, fp_exceptions

WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))

Loss = Callable[[Tensor], Tensor]


def mean_square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def train(
    model: nn.Module,
    x: Tensor = X,
    optimizer: Optimizer | None = None,
    steps: int = 1,
    loss: Loss = mean_square,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> NonfiniteReport:
    """What is found in a few steps."""
    optimizer = optimizer or SGD(model.parameters(), lr=1e-3)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    with fp_exceptions(model, optimizer, **options) as found:
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(loss(model(x))).backward()
            scaler.step(optimizer)
            scaler.update()
    return found


def only(found: NonfiniteReport, verdict: str = "finding") -> FpException:
    """The one exception there is."""
    (exception,) = found.of(verdict)
    assert sum(found.counts.values()) == found.counts[verdict]
    return exception


def line_of(function: Callable[..., Any], code: str) -> str:
    """The end of a location: the line of a function that holds some code."""
    lines, first = inspect.getsourcelines(function)
    number = next(first + i for i, text in enumerate(lines) if code in text)
    return f"test_faults.py:{number} ({function.__name__})"


def named(**layers: nn.Module) -> nn.Sequential:
    """Layers one after the other, by name."""
    return nn.Sequential(OrderedDict(layers))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return named(first=nn.Linear(WIDTH, WIDTH), act=nn.Tanh(), last=nn.Linear(WIDTH, WIDTH))


def too_fast(model: Any, lr: float) -> list[dict[str, Any]]:
    """Groups of a stack's parameters: the learning rate of the last weight is `lr`."""
    rest = [*model.first.parameters(), model.last.bias]
    return [{"params": rest, "lr": 1e-3}, {"params": [model.last.weight], "lr": lr}]


# ---- forward -------------------------------------------------------------------------------------


class Factor(nn.Module):
    """Multiplies by a constant, forward and backward."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Scale(Factor):
    """Multiplies twice."""

    def forward(self, x: Tensor) -> Tensor:
        large = x * self.by
        return large * self.by


def test_an_overflow_in_a_named_layer_s_forward_pass() -> None:
    model = named(first=nn.Linear(WIDTH, WIDTH), scale=Scale(300.0), last=nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(WIDTH))
        model.first.bias.zero_()
    found = train(model.half(), X.half().clamp(-1, 1))
    e = only(found)
    assert (e.kind, e.op, e.phase, e.module, e.module_kind) == (
        "overflow",
        "mul",
        "forward",
        "scale",
        "Scale",
    )
    assert e.step == 1
    assert e.location is not None
    assert e.location.endswith(line_of(Scale.forward, "return large"))
    (given,), (made,) = e.inputs, e.outputs
    exact = (X.half().clamp(-1, 1).float() * 300).half()
    assert (given.name, given.dtype, given.shape) == ("self", "float16", (4, WIDTH))
    assert (given.low, given.high) == (exact.min().item(), exact.max().item())
    assert (given.nan, given.inf) == (0, 0)
    beyond = int((exact.double() * 300).abs().ge(65520).sum())
    assert beyond > 0
    assert (made.nan, made.inf) == (0, beyond)
    assert e.in_float64 is not None
    assert e.in_float64.max_abs == (exact.double() * 300).abs().max().item()
    assert e.reached[:2] == ("the model's output", "the loss")
    assert "gradient of last.weight" in e.reached
    assert "parameter first.weight" in e.reached


def test_an_overflow_in_a_region_of_op_lists() -> None:
    caster = OpListCaster(op_lists(lower=["linear"], fp32=["softmax"]), torch.float16)
    model = stack()
    for p in model.last.parameters():
        nn.init.constant_(p, 6e4)
    optimizer = SGD(model.parameters(), lr=0.0)
    with fp_exceptions(model, optimizer) as found:
        with caster.region():
            output = model(X)
        caster.backward(mean_square(output))
        optimizer.step()
    e = found.findings[0]
    assert (e.op, e.phase, e.module, e.kind) == ("addmm", "forward", "last", "overflow")


class Divides(nn.Module):
    """Divides by 0."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.zeros(WIDTH, dtype=torch.int64)
        zero = x - x
        given = {"zeros": (zero, zero), "one": (1, zero), "integers": (counts, counts.sum())}
        above, below = given[self.kind]
        return x * (above / below)


@pytest.mark.parametrize(
    ("kind", "what", "op", "read"),
    [
        ("zeros", "invalid", "div", ["float32", "float32"]),
        ("one", "infinite", "reciprocal", ["float32"]),
        ("integers", "invalid", "div", ["int64", "int64"]),
    ],
)
def test_a_division_by_zero_is_the_same_in_any_precision(
    kind: str, what: str, op: str, read: list[str]
) -> None:
    e = train(named(first=nn.Linear(WIDTH, WIDTH), part=Divides(kind))).findings[0]
    assert (e.kind, e.op, e.phase, e.module) == (what, op, "forward", "part")
    assert e.in_float64 is not None
    bad = (e.outputs[0].nan, e.outputs[0].inf)
    assert bad == (e.in_float64.nan, e.in_float64.inf)
    assert sum(x or 0 for x in bad) == (WIDTH if kind == "integers" else 4 * WIDTH)
    assert e.location is not None
    assert e.location.endswith(line_of(Divides.forward, "above / below"))
    assert [x.dtype for x in e.inputs] == read
    assert {x.high for x in e.inputs if x.dtype == "float32"} <= {0.0}


# ---- backward ------------------------------------------------------------------------------------


class Root(nn.Module):
    """The root of 0, whose slope is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        zero = (x * 0).abs()
        return zero.sqrt() + x


def test_an_exception_in_the_backward_pass_alone() -> None:
    found = train(named(first=nn.Linear(WIDTH, WIDTH), root=Root(), last=nn.Linear(WIDTH, 2)))
    e = found.findings[0]
    assert (e.kind, e.op, e.phase, e.module) == ("infinite", "div", "backward", "root")
    assert e.location is not None
    assert e.location.endswith(line_of(Root.forward, "zero.sqrt()"))  # of the forward op
    assert "the loss" not in e.reached
    assert e.reached[0] == "gradient of first.weight"
    assert "gradient of last.weight" not in e.reached


class Careless(torch.autograd.Function):
    """An op with a gradient of one's own, and a mistake in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e30 * 1e30


def test_a_backward_function_of_one_s_own_is_named_by_its_own_line() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Careless.apply(x)  # type: ignore[no-any-return]

    e = train(named(first=nn.Linear(WIDTH, WIDTH), own=Own())).findings[0]
    assert (e.kind, e.op, e.phase, e.module) == ("overflow", "mul", "backward", "own")
    assert e.location is not None
    assert e.location.endswith(line_of(Careless.backward, "return gradient"))


def test_gradients_that_overflow_as_they_are_added_up() -> None:
    model = named(only=nn.Linear(WIDTH, WIDTH)).half()
    optimizer = SGD(model.parameters(), lr=0.0)
    with fp_exceptions(model, optimizer) as found:
        for _ in range(3):
            (model(torch.full((1, WIDTH), 100.0).half()).float().sum() * 300).backward()
        optimizer.step()
    e = found.findings[0]
    assert (e.op, e.phase, e.kind) == ("add_", "backward", "overflow")
    assert e.reached == ("gradient of only.weight", "parameter only.weight")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_named(reentrant: bool) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = named(linear=nn.Linear(WIDTH, WIDTH), scale=Scale(300.0))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = named(first=nn.Linear(WIDTH, WIDTH), kept=Kept()).half()
    with torch.no_grad():
        model.kept.inner.linear.bias.fill_(2.0)
    found = train(model, X.half())
    e = found.findings[0]
    assert (e.op, e.phase, e.module) == ("mul", "forward", "kept.inner.scale")
    assert {x.key for x in found.findings} == {e.key}  # its recomputation is no other one


def first_overflow(start: float, factors: list[float]) -> int | None:
    """Which of some products in float16, one after the other, is the first that is infinite."""
    value = torch.tensor(start, dtype=torch.float16)
    for i, factor in enumerate(factors):
        value = value * factor
        if value.isinf():
            return i
    return None


@given(
    st.lists(st.sampled_from([1e-3, 0.1, 1.0, 30.0, 1e3, 2e4]), min_size=1, max_size=7),
    st.sampled_from([1e-4, 1.0, 100.0]),
    st.sampled_from([1e-3, 1.0, 1e3]),
)
@settings(max_examples=60)
def test_of_a_chain_of_products_the_first_overflow_is_named(
    factors: list[float], x: float, gradient: float
) -> None:
    """Against the products done by hand, in both directions."""
    model = nn.Sequential(*(Factor(f) for f in factors))
    given = torch.tensor([x], dtype=torch.float16, requires_grad=True)
    with fp_exceptions(model) as found:
        output = model(given)
        output.backward(torch.tensor([gradient], dtype=torch.float16))
    forward = first_overflow(x, factors)
    backward = first_overflow(gradient, factors[::-1])
    expected = [("forward", str(forward))] if forward is not None else []
    if backward is not None:
        expected.append(("backward", str(len(factors) - 1 - backward)))
    assert [(e.phase, e.module) for e in found.findings] == expected
    assert {e.kind for e in found.findings} <= {"overflow"}


# ---- the optimizer -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, {"engine": "c", "rounding": "nearest"}),
        (optim.AdamW, {"engine": "eager", "rounding": "nearest"}),
        (SGD, {"foreach": True}),
        (SGD, {"fused": True}),
    ],
    ids=["c", "eager", "foreach", "fused"],
)
def test_an_overflow_in_an_optimizer_names_the_parameter(kind: Any, options: Any) -> None:
    model = stack()
    model, x, lr = (model.half(), X.half(), 1e9) if kind is not SGD else (model, X, 3e38)
    optimizer = kind(too_fast(model, lr), lr=1e-3, **options)
    e = only(train(model, x, optimizer, loss=lambda output: output.float().sum() * 100))
    assert (e.kind, e.op, e.phase) == ("overflow", f"{kind.__name__}.step", "optimizer")
    assert (e.module, e.module_kind) == ("last", "Linear")
    assert e.reached == ("parameter last.weight",)
    assert e.outputs[0].name == "parameter last.weight"
    assert e.outputs[0].inf == WIDTH * WIDTH
    assert [x.name for x in e.inputs] == ["gradient of last.weight"]


def test_a_second_moment_that_overflows_names_the_state() -> None:
    model = stack()
    optimizer = Adam(model.parameters(), lr=1e-3, foreach=False)

    def loss(output: Tensor) -> Tensor:
        return output.sum() * 1e25

    e = train(model, optimizer=optimizer, loss=loss).findings[0]
    assert (e.kind, e.op, e.phase) == ("overflow", "Adam.step", "optimizer")
    assert e.reached == ("exp_avg_sq of first.weight",) or e.reached[0].startswith("exp_avg_sq of")
    assert all(what.startswith("exp_avg_sq") for what in e.reached)


def test_what_bad_gradients_do_to_weights_is_not_the_optimizer_s_fault() -> None:
    for kind in (SGD, optim.SGD):
        model = named(first=nn.Linear(WIDTH, WIDTH), root=Root())
        found = train(model, optimizer=kind(model.parameters(), lr=1e-3))
        assert {e.phase for e in found.findings} == {"backward"}
        assert "parameter first.weight" in found.findings[0].reached


# ---- batch normalization -------------------------------------------------------------------------


def test_running_statistics_gone_bad() -> None:
    """float16's largest is 65504: the variance of numbers in the hundreds is beyond."""
    model = named(first=nn.Linear(WIDTH, WIDTH), norm=nn.BatchNorm1d(WIDTH, momentum=1.0)).half()
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(WIDTH))
    e = only(train(model, X.half() * 1000))
    assert (e.op, e.phase, e.module) == ("native_batch_norm", "forward", "norm")
    assert e.module_kind == "BatchNorm1d"
    assert e.reached == ("buffer norm.running_var",)
    assert [x.name for x in e.outputs] == ["running_var"]
    assert "running_var" in [x.name for x in e.inputs]  # it was read, and was finite
    assert all(math.isfinite(x.high) for x in e.inputs if x.high is not None)


def test_statistics_that_a_skipped_step_leaves_bad_are_a_finding() -> None:
    """A scaler skips the update; what the forward pass wrote stays."""
    model = named(scale=Scale(300.0), norm=nn.BatchNorm1d(WIDTH), last=nn.Linear(WIDTH, 1)).half()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    found = train(model, X.half(), optimizer, scaler=scaler)
    e = found.findings[0]
    assert (e.op, e.module) == ("mul", "scale")
    assert "buffer norm.running_mean" in e.reached
    assert not [what for what in e.reached if what.startswith("parameter")]


# ---- what came from elsewhere --------------------------------------------------------------------


def test_the_next_step_s_consequences_are_no_new_findings() -> None:
    model = named(first=nn.Linear(WIDTH, WIDTH), root=Root())
    found = train(model, steps=3)
    assert {e.step for e in found.findings} == {1}
    assert {e.last_step for e in found.findings} == {1}
